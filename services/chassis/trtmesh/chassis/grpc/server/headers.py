"""The headers on a server: parses requests, encodes response headers and trailers (gRPC over HTTP/2)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

import grpc
from trtmesh.chassis.grpc.metadata import (
    ACCEPTED_ENCODINGS,
    CONTENT_TYPE,
    Metadata,
    metadata_block,
    sort_headers,
)
from trtmesh.chassis.http2.frames import ErrorCode, Http2StreamError
from trtmesh.chassis.http2.headers import literal_field

MAX_MESSAGE_BYTES = 4096
"""Limit of grpc-message: clients refuse trailers of more than 8 to 16 KiB."""

_UNIT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")

_CONTENT_LENGTH = re.compile(r"[0-9]{1,18}")

_REQUIRED = (":method", ":scheme", ":path")
_PSEUDO = (*_REQUIRED, ":authority")
_GRPC = (
    *("te", "content-type", "content-length"),
    *("grpc-timeout", "grpc-encoding", "grpc-accept-encoding"),
)
_OK_STATUS = b"\x88"
"""`:status: 200`, entry 8 of the static table of HPACK."""

_UNPRINTABLE = re.compile(rb"[^\x20-\x24\x26-\x7e]")


@dataclass(frozen=True, slots=True)
class RequestHeaders:
    path: str
    metadata: Metadata
    timeout: float | None
    """Seconds; None without a deadline."""
    encoding: str
    """grpc-encoding of the messages; identity if none is compressed."""
    accepted_encodings: str
    """grpc-accept-encoding, the encodings allowed for answers; '' for none."""
    content_length: int | None
    """Bytes of all messages; None if the client did not count them."""


class NotGrpc(Exception):
    """An HTTP request without gRPC; the response is an HTTP `status`."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


def parse_request_headers(fields: Iterable[tuple[bytes, bytes]]) -> RequestHeaders:
    """Raises Http2StreamError for malformed headers, and NotGrpc."""
    found = sort_headers(fields, _PSEUDO, _GRPC)
    if not all(found.pseudo.get(name) for name in _REQUIRED):
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, ":method, :scheme or :path is missing")
    if found.grpc.get("te", "trailers") != "trailers":
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "te is not 'trailers'")
    content_length = _bytes(found.grpc.get("content-length"))
    if found.pseudo[":method"] != "POST":
        raise NotGrpc(405)
    if not CONTENT_TYPE.match(found.grpc.get("content-type", "")):
        raise NotGrpc(415)
    return RequestHeaders(
        found.pseudo[":path"],
        tuple(found.metadata),
        _seconds(found.grpc.get("grpc-timeout")),
        found.grpc.get("grpc-encoding", "identity"),
        found.grpc.get("grpc-accept-encoding", ""),
        content_length,
    )


def check_trailers(fields: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises Http2StreamError for malformed trailers of a request. gRPC has none."""
    sort_headers(fields, (), _GRPC)


def _bytes(content_length: str | None) -> int | None:
    if content_length is None:
        return None
    if not _CONTENT_LENGTH.fullmatch(content_length):
        raise Http2StreamError(
            ErrorCode.PROTOCOL_ERROR, f"content-length is {content_length[:20]!r}"
        )
    return int(content_length)


def _seconds(timeout: str | None) -> float | None:
    if timeout is None:
        return None
    if (parts := _TIMEOUT.fullmatch(timeout)) is None:
        raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, f"grpc-timeout is {timeout[:20]!r}")
    return int(parts[1]) * _UNIT_SECONDS[parts[2]]


def response_headers(metadata: Metadata = (), encoding: str = "identity") -> bytes:
    """The header block that starts a response."""
    block = _RESPONSE_HEADERS
    if encoding != "identity":
        block += literal_field(b"grpc-encoding", encoding.encode())
    return block + metadata_block(metadata) if metadata else block


def trailers(status: grpc.StatusCode, details: str = "", metadata: bytes = b"") -> bytes:
    """The header block that ends a response; `metadata` is an encoded header block."""
    # An enumeration's hash is a call of a function.
    block = _STATUS_OK if status is grpc.StatusCode.OK else _STATUS_FIELDS[status]
    if details:
        block += literal_field(b"grpc-message", _percent_encoded(details))
    return block + metadata


def http_response(status: int) -> bytes:
    """The header block of a response without gRPC."""
    return literal_field(b":status", b"%d" % status)


def _percent_encoded(details: str) -> bytes:
    data = details.encode("utf-8", "replace")
    encoded = quote(data, safe=_PRINTABLE).encode() if _UNPRINTABLE.search(data) else data
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded
    # Never cuts inside an escape. A character cut in two is read as U+FFFD.
    return re.sub(rb"%.?$", b"", encoded[: MAX_MESSAGE_BYTES - 3]) + b"..."


_PRINTABLE = "".join(map(chr, [*range(0x20, 0x25), *range(0x26, 0x7F)]))


_STATUS_FIELDS = {
    status: literal_field(b"grpc-status", b"%d" % status.value[0]) for status in grpc.StatusCode
}
_STATUS_OK = _STATUS_FIELDS[grpc.StatusCode.OK]

_RESPONSE_HEADERS = (
    _OK_STATUS
    + literal_field(b"content-type", b"application/grpc")
    + literal_field(b"grpc-accept-encoding", ACCEPTED_ENCODINGS)
)
