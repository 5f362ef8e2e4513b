"""Header lists of gRPC: pseudo-headers, gRPC's own headers and the application's metadata (gRPC over HTTP/2)."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from trtmesh.chassis.http2.frames import ErrorCode, Http2StreamError
from trtmesh.chassis.http2.headers import literal_field

Metadata = tuple[tuple[str, str | bytes], ...]

CONTENT_TYPE = re.compile(r"application/grpc($|[+;])")
"""Not grpc-web, which sends trailers as data."""

ACCEPTED_ENCODINGS = b"identity, deflate, gzip"

_NAME = re.compile(r"[0-9a-z_.\-]+")
_FORBIDDEN = re.compile(rb"[\0\r\n]")
_CONNECTION_SPECIFIC = (
    "connection",
    "keep-alive",
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
)
"""Headers forbidden by RFC 9113, section 8.2.2."""


@dataclass(slots=True)
class HeaderList:
    """A header list sorted by reader: HTTP/2, gRPC, the application."""

    pseudo: dict[str, str] = field(default_factory=dict)
    grpc: dict[str, str] = field(default_factory=dict)
    metadata: list[tuple[str, str | bytes]] = field(default_factory=list)


def sort_headers(
    fields: Iterable[tuple[bytes, bytes]], pseudo: Collection[str], grpc: Collection[str]
) -> HeaderList:
    """Sorts a header list by the names in `pseudo` and `grpc`. Raises Http2StreamError if it is malformed (RFC 9113,
    section 8.2)."""
    found = HeaderList()
    for raw_name, raw_value in fields:
        name, value = raw_name.decode("latin-1"), raw_value.decode("utf-8", "replace")
        if name.startswith(":"):
            if name not in pseudo or name in found.pseudo or found.grpc or found.metadata:
                raise _malformed(f"pseudo-header {name[:40]!r} is unknown, repeated or late")
            found.pseudo[name] = value
        elif not _NAME.fullmatch(name) or name in _CONNECTION_SPECIFIC:
            raise _malformed(f"header name {name[:40]!r} is not allowed")
        elif _FORBIDDEN.search(raw_value):
            raise _malformed(f"header {name[:40]!r} contains NUL, CR or LF")
        elif name in grpc:
            found.grpc[name] = value
        elif name.endswith("-bin"):
            found.metadata += ((name, _from_base64(part)) for part in raw_value.split(b","))
        else:
            found.metadata.append((name, value))
    return found


def metadata_block(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Encodes metadata as a header block."""
    return b"".join(literal_field(name.encode(), _value(name, value)) for name, value in metadata)


def _malformed(problem: str) -> Http2StreamError:
    return Http2StreamError(ErrorCode.PROTOCOL_ERROR, problem)


def _from_base64(text: bytes) -> bytes:
    try:
        text = text.strip()  # Proxies may join values with a comma and a space.
        return b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise _malformed("binary metadata is not base64") from error


def _value(name: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b64encode(data).rstrip(b"=") if name.endswith("-bin") else data
