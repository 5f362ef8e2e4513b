"""What clients write and read of a call's headers and trailers (gRPC over HTTP/2, "Requests" and "Responses")."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import unquote

import grpc
from trtmesh.chassis.grpc.metadata import CONTENT_TYPE, Metadata, header, sort_fields
from trtmesh.chassis.http2.frames import ErrorCode

_OF_HEADS = ("content-type", "grpc-encoding", "grpc-accept-encoding", "grpc-status", "grpc-message")
_CODES = {int(code.value[0]): code for code in grpc.StatusCode}

_OF_HTTP = {
    "400": grpc.StatusCode.INTERNAL,
    "401": grpc.StatusCode.UNAUTHENTICATED,
    "403": grpc.StatusCode.PERMISSION_DENIED,
    "404": grpc.StatusCode.UNIMPLEMENTED,
    "429": grpc.StatusCode.UNAVAILABLE,
    "502": grpc.StatusCode.UNAVAILABLE,
    "503": grpc.StatusCode.UNAVAILABLE,
    "504": grpc.StatusCode.UNAVAILABLE,
}
"""What an answer of HTTP means that no gRPC server gave (gRPC, "HTTP to gRPC Status Code Mapping")."""

_OF_RESETS = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""What a reset means (gRPC over HTTP/2, "Errors"); everything else is INTERNAL."""

_MOST_TIMEOUT_MS = 10**8 - 1


@dataclass(frozen=True, slots=True)
class Status:
    """What a call ended with."""

    code: grpc.StatusCode
    details: str
    metadata: Metadata = ()


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What a response begins with: how its messages are compressed."""

    encoding: str


def request_head(path: str, authority: str, timeout: float | None) -> bytes:
    """The header block of a call; `timeout` in seconds."""
    block = (
        header(b":method", b"POST")
        + header(b":scheme", b"http")
        + header(b":path", path.encode())
        + header(b":authority", authority.encode())
        + _FIXED
    )
    if timeout is None:
        return block
    milliseconds = min(max(1, round(timeout * 1000)), _MOST_TIMEOUT_MS)
    return block + header(b"grpc-timeout", b"%dm" % milliseconds)


def parse_head(fields: Iterable[tuple[bytes, bytes]]) -> ResponseHead | Status | None:
    """Reads the header list that a response begins with: a Status where it is also its end, or no answer of gRPC; None
    where it only says that another follows. Raises StreamFailed where it is malformed."""
    found = sort_fields(fields, (":status",), _OF_HEADS)
    http = found.pseudo.get(":status", "none")
    if http.startswith("1"):
        return None
    if "grpc-status" in found.given:
        return _status(found.given, found.metadata)
    if http != "200":
        code = _OF_HTTP.get(http, grpc.StatusCode.UNKNOWN)
        return Status(code, f"it answered with HTTP status {http[:40]}")
    kind = found.given.get("content-type", "")
    if not CONTENT_TYPE.match(kind):
        return Status(grpc.StatusCode.UNKNOWN, f"it answered with content-type {kind[:40]!r}")
    return ResponseHead(found.given.get("grpc-encoding", "identity"))


def parse_trailers(fields: Iterable[tuple[bytes, bytes]]) -> Status:
    """Reads the header list that a response ends with. Raises StreamFailed where it is malformed."""
    found = sort_fields(fields, (), _OF_HEADS)
    return _status(found.given, found.metadata)


def status_of_reset(code: ErrorCode) -> Status:
    """What a call ended with that its server reset."""
    status = _OF_RESETS.get(code, grpc.StatusCode.INTERNAL)
    return Status(status, f"the server reset the call: {code.name}")


def _status(given: dict[str, str], metadata: list[tuple[str, str | bytes]]) -> Status:
    text = given.get("grpc-status", "none")
    code = _CODES.get(int(text)) if text.isdecimal() and len(text) < 4 else None
    details = unquote(given.get("grpc-message", ""))
    if code is None:
        return Status(grpc.StatusCode.UNKNOWN, f"grpc-status is {text[:40]!r}: {details}")
    return Status(code, details, tuple(metadata))


_FIXED = (
    header(b"te", b"trailers")
    + header(b"content-type", b"application/grpc")
    + header(b"user-agent", b"trtmesh")
    + header(b"grpc-accept-encoding", b"identity, deflate, gzip")
)
