"""The headers on a client: encodes requests, parses response headers and trailers (gRPC over HTTP/2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

import grpc
from trtmesh.chassis.grpc.metadata import (
    ACCEPTED_ENCODINGS,
    CONTENT_TYPE,
    HeaderList,
    Metadata,
    sort_headers,
)
from trtmesh.chassis.http2.frames import ErrorCode
from trtmesh.chassis.http2.headers import literal_field

_GRPC = ("content-type", "grpc-encoding", "grpc-accept-encoding", "grpc-status", "grpc-message")
_CODES = {int(code.value[0]): code for code in grpc.StatusCode}

_STATUS_OF_HTTP = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    "429": grpc.StatusCode.UNAVAILABLE,
    "502": grpc.StatusCode.UNAVAILABLE,
    "503": grpc.StatusCode.UNAVAILABLE,
    "504": grpc.StatusCode.UNAVAILABLE,
}
"""The gRPC status for the HTTP status of other servers (gRPC, "HTTP to gRPC Status Code Mapping")."""

_STATUS_OF_RESET = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""The gRPC status for a RST_STREAM (gRPC over HTTP/2, "Errors"); other codes are INTERNAL."""

_MOST_TIMEOUT_MS = 10**8 - 1


@dataclass(frozen=True, slots=True)
class Status:
    """The end of a call."""

    code: grpc.StatusCode
    details: str
    metadata: Metadata = ()


@dataclass(frozen=True, slots=True)
class ResponseHeaders:
    """The headers of a response; messages follow."""

    encoding: str


def request_headers(path: str, authority: str, timeout: float | None) -> bytes:
    """The header block of a request; `timeout` in seconds."""
    block = (
        literal_field(b":method", b"POST")
        + literal_field(b":scheme", b"http")
        + literal_field(b":path", path.encode())
        + literal_field(b":authority", authority.encode())
        + _FIXED_HEADERS
    )
    if timeout is None:
        return block
    milliseconds = min(max(1, round(timeout * 1000)), _MOST_TIMEOUT_MS)
    return block + literal_field(b"grpc-timeout", b"%dm" % milliseconds)


def parse_response_headers(
    fields: Iterable[tuple[bytes, bytes]],
) -> ResponseHeaders | Status | None:
    """A Status for trailers-only and for a response without gRPC; None for 1xx, before other headers. Raises
    Http2StreamError for malformed headers."""
    found = sort_headers(fields, (":status",), _GRPC)
    http = found.pseudo.get(":status", "none")
    if http.startswith("1"):
        return None
    if "grpc-status" in found.grpc:
        return _status(found)
    if http != "200":
        code = _STATUS_OF_HTTP.get(http, grpc.StatusCode.UNKNOWN)
        return Status(code, f"the response has HTTP status {http[:40]}")
    kind = found.grpc.get("content-type", "")
    if not CONTENT_TYPE.match(kind):
        return Status(grpc.StatusCode.UNKNOWN, f"the response has content-type {kind[:40]!r}")
    return ResponseHeaders(found.grpc.get("grpc-encoding", "identity"))


def parse_trailers(fields: Iterable[tuple[bytes, bytes]]) -> Status:
    """Raises Http2StreamError for malformed trailers."""
    return _status(sort_headers(fields, (), _GRPC))


def status_of_reset(code: ErrorCode) -> Status:
    """The end of a call that the server reset."""
    status = _STATUS_OF_RESET.get(code, grpc.StatusCode.INTERNAL)
    return Status(status, f"the server reset the stream: {code.name}")


def _status(headers: HeaderList) -> Status:
    text = headers.grpc.get("grpc-status", "none")
    code = _CODES.get(int(text)) if text.isdecimal() and len(text) < 4 else None
    details = unquote(headers.grpc.get("grpc-message", ""))
    if code is None:
        return Status(grpc.StatusCode.UNKNOWN, f"grpc-status is {text[:40]!r}: {details}")
    return Status(code, details, tuple(headers.metadata))


_FIXED_HEADERS = (
    literal_field(b"te", b"trailers")
    + literal_field(b"content-type", b"application/grpc")
    + literal_field(b"user-agent", b"trtmesh")
    + literal_field(b"grpc-accept-encoding", ACCEPTED_ENCODINGS)
)
