"""What servers read and write of a call's headers and trailers (gRPC over HTTP/2, "Requests" and "Responses")."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

import grpc
from trtmesh.chassis.grpc.metadata import (
    CONTENT_TYPE,
    Metadata,
    header,
    metadata_block,
    sort_fields,
)
from trtmesh.chassis.http2.frames import ErrorCode, StreamFailed

MOST_DETAIL_BYTES = 4096
"""Of a status' message: clients refuse trailers of more than 8 to 16 KiB."""

_UNIT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")

_PSEUDO = (":method", ":scheme", ":path", ":authority")
_OF_CALLS = ("te", "content-type", "grpc-timeout", "grpc-encoding", "grpc-accept-encoding")
_OK_STATUS = b"\x88"
"""`:status: 200`, entry 8 of HPACK's static table."""

_UNPRINTABLE = re.compile(rb"[^\x20-\x24\x26-\x7e]")


@dataclass(frozen=True, slots=True)
class CallHead:
    """What a call's headers say. `timeout` in seconds, None without a deadline."""

    path: str
    metadata: Metadata
    timeout: float | None
    encoding: str


class NoCall(Exception):
    """A request of HTTP that is no call of gRPC; `status` answers it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


def parse_head(fields: Iterable[tuple[bytes, bytes]]) -> CallHead:
    """Reads a request's header list. Raises StreamFailed where it is malformed (RFC 9113, section 8.2) and NoCall."""
    found = sort_fields(fields, _PSEUDO, _OF_CALLS)
    if not {":method", ":scheme", ":path"} <= found.pseudo.keys():
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, ":method, :scheme or :path is missing")
    if found.pseudo[":method"] != "POST":
        raise NoCall(405)
    if not CONTENT_TYPE.match(found.given.get("content-type", "")):
        raise NoCall(415)
    return CallHead(
        found.pseudo[":path"],
        tuple(found.metadata),
        _seconds(found.given.get("grpc-timeout")),
        found.given.get("grpc-encoding", "identity"),
    )


def _seconds(timeout: str | None) -> float | None:
    if timeout is None:
        return None
    if (parts := _TIMEOUT.fullmatch(timeout)) is None:
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"grpc-timeout is {timeout[:20]!r}")
    return int(parts[1]) * _UNIT_SECONDS[parts[2]]


def response_head(metadata: Metadata = ()) -> bytes:
    """The header block that a response begins with."""
    return _RESPONSE_HEAD + metadata_block(metadata) if metadata else _RESPONSE_HEAD


def trailers(status: grpc.StatusCode, details: str = "", metadata: bytes = b"") -> bytes:
    """The header block that a response ends with; `metadata` is a block of it."""
    code: int = status.value[0]
    block = header(b"grpc-status", b"%d" % code)
    if details:
        block += header(b"grpc-message", _percent_encoded(details))
    return block + metadata


def http_answer(status: int) -> bytes:
    """The header block that answers what is no call."""
    return header(b":status", b"%d" % status)


def _percent_encoded(details: str) -> bytes:
    data = details.encode("utf-8", "replace")
    encoded = quote(data, safe=_PRINTABLE).encode() if _UNPRINTABLE.search(data) else data
    if len(encoded) <= MOST_DETAIL_BYTES:
        return encoded
    # No escape is cut in two; a character may be, and readers put U+FFFD there.
    return re.sub(rb"%.?$", b"", encoded[: MOST_DETAIL_BYTES - 3]) + b"..."


_PRINTABLE = "".join(map(chr, [*range(0x20, 0x25), *range(0x26, 0x7F)]))


_RESPONSE_HEAD = (
    _OK_STATUS
    + header(b"content-type", b"application/grpc")
    + header(b"grpc-accept-encoding", b"identity, deflate, gzip")
)
