"""Fields of header lists: metadata and what gRPC itself writes there (gRPC over HTTP/2; HPACK is RFC 7541)."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from trtmesh.chassis.http2.frames import ErrorCode, StreamFailed

Metadata = tuple[tuple[str, str | bytes], ...]

CONTENT_TYPE = re.compile(r"application/grpc($|[+;])")
"""grpc-web, whose trailers are data, is another protocol."""

_NAME = re.compile(r"[0-9a-z_.\-]+")
_FORBIDDEN = re.compile(rb"[\0\r\n]")
_OF_CONNECTIONS = ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")


@dataclass(slots=True)
class SortedFields:
    """A header list by who reads it: HTTP/2, gRPC, or the application."""

    pseudo: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    metadata: list[tuple[str, str | bytes]] = field(default_factory=list)


def sort_fields(
    fields: Iterable[tuple[bytes, bytes]], pseudo: Collection[str], given: Collection[str]
) -> SortedFields:
    """Sorts a header list; `pseudo` and `given` name what may be, and what is gRPC's own. Raises StreamFailed where it
    is malformed (RFC 9113, section 8.2)."""
    found = SortedFields()
    for raw_name, raw_value in fields:
        name, value = raw_name.decode("latin-1"), raw_value.decode("utf-8", "replace")
        if name.startswith(":"):
            if name not in pseudo or name in found.pseudo or found.given or found.metadata:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"{name[:40]!r} has no place here")
            found.pseudo[name] = value
        elif not _NAME.fullmatch(name) or name in _OF_CONNECTIONS:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"{name[:40]!r} is no name of a header")
        elif _FORBIDDEN.search(raw_value):
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"{name[:40]!r} has more than one line")
        elif name in given:
            found.given[name] = value
        elif name.endswith("-bin"):
            found.metadata += ((name, _from_base64(part)) for part in raw_value.split(b","))
        else:
            found.metadata.append((name, value))
    return found


def _from_base64(text: bytes) -> bytes:
    try:
        text = text.strip()  # Proxies may join values by a comma and a space.
        return b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "binary metadata is no base64") from error


def metadata_block(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The header block of metadata."""
    return b"".join(header(name.encode(), _value(name, value)) for name, value in metadata)


def _value(name: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b64encode(data).rstrip(b"=") if name.endswith("-bin") else data


def header(name: bytes, value: bytes) -> bytes:
    """A literal field without indexing (RFC 7541, section 6.2.2): no state of the connection, so blocks can be kept."""
    return b"\x00" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    """An integer with a prefix of seven bits (RFC 7541, section 5.1)."""
    if size < 0x7F:
        return bytes((size,))
    rest = size - 0x7F
    data = bytearray((0x7F,))
    while rest >= 0x80:
        data.append(rest & 0x7F | 0x80)
        rest >>= 7
    data.append(rest)
    return bytes(data)
