"""Headers and trailers of gRPC calls (gRPC over HTTP/2, "Requests" and "Responses"; HPACK is RFC 7541)."""

from __future__ import annotations

import binascii
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

import grpc
from trtmesh.chassis.grpc_server.frames import ErrorCode, StreamFailed

Metadata = tuple[tuple[str, str | bytes], ...]

MOST_DETAIL_BYTES = 4096
"""Of a status' message: clients refuse trailers of more than 8 to 16 KiB."""

_UNIT_SECONDS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_NAME = re.compile(r"[0-9a-z_.\-]+")
_FORBIDDEN = re.compile(rb"[\0\r\n]")
_CONTENT_TYPE = re.compile(r"application/grpc($|[+;])")
"""grpc-web, whose trailers are data, is another protocol."""

_PSEUDO = (":method", ":scheme", ":path", ":authority")
_OF_CONNECTIONS = ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
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
    pseudo: dict[str, str] = {}
    given: dict[str, str] = {}
    metadata: list[tuple[str, str | bytes]] = []
    for raw_name, raw_value in fields:
        name, value = raw_name.decode("latin-1"), raw_value.decode("utf-8", "replace")
        if name.startswith(":"):
            if name not in _PSEUDO or name in pseudo or given or metadata:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"{name[:40]!r} has no place here")
            pseudo[name] = value
        elif not _NAME.fullmatch(name) or name in _OF_CONNECTIONS:
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"{name[:40]!r} is no name of a header")
        elif _FORBIDDEN.search(raw_value):
            raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"{name[:40]!r} has more than one line")
        elif name in _OF_CALLS:
            given[name] = value
        elif name.endswith("-bin"):
            metadata += ((name, _from_base64(part)) for part in raw_value.split(b","))
        else:
            metadata.append((name, value))
    if not {":method", ":scheme", ":path"} <= pseudo.keys():
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, ":method, :scheme or :path is missing")
    if pseudo[":method"] != "POST":
        raise NoCall(405)
    if not _CONTENT_TYPE.match(given.get("content-type", "")):
        raise NoCall(415)
    return CallHead(
        pseudo[":path"],
        tuple(metadata),
        _seconds(given.get("grpc-timeout")),
        given.get("grpc-encoding", "identity"),
    )


def _seconds(timeout: str | None) -> float | None:
    if timeout is None:
        return None
    if (parts := _TIMEOUT.fullmatch(timeout)) is None:
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, f"grpc-timeout is {timeout[:20]!r}")
    return int(parts[1]) * _UNIT_SECONDS[parts[2]]


def _from_base64(text: bytes) -> bytes:
    try:
        text = text.strip()  # Proxies may join values by a comma and a space.
        return b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "binary metadata is no base64") from error


def response_head(metadata: Metadata = ()) -> bytes:
    """The header block that a response begins with."""
    return _RESPONSE_HEAD + metadata_block(metadata) if metadata else _RESPONSE_HEAD


def trailers(status: grpc.StatusCode, details: str = "", metadata: bytes = b"") -> bytes:
    """The header block that a response ends with; `metadata` is a block of it."""
    code: int = status.value[0]
    block = _field(b"grpc-status", b"%d" % code)
    if details:
        block += _field(b"grpc-message", _percent_encoded(details))
    return block + metadata


def http_answer(status: int) -> bytes:
    """The header block that answers what is no call."""
    return _field(b":status", b"%d" % status)


def _percent_encoded(details: str) -> bytes:
    data = details.encode("utf-8", "replace")
    encoded = quote(data, safe=_PRINTABLE).encode() if _UNPRINTABLE.search(data) else data
    if len(encoded) <= MOST_DETAIL_BYTES:
        return encoded
    # No escape is cut in two; a character may be, and readers put U+FFFD there.
    return re.sub(rb"%.?$", b"", encoded[: MOST_DETAIL_BYTES - 3]) + b"..."


_PRINTABLE = "".join(map(chr, [*range(0x20, 0x25), *range(0x26, 0x7F)]))


def metadata_block(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """The header block of metadata."""
    return b"".join(_field(name.encode(), _value(name, value)) for name, value in metadata)


def _value(name: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b64encode(data).rstrip(b"=") if name.endswith("-bin") else data


def _field(name: bytes, value: bytes) -> bytes:
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


_RESPONSE_HEAD = (
    _OK_STATUS
    + _field(b"content-type", b"application/grpc")
    + _field(b"grpc-accept-encoding", b"identity, deflate, gzip")
)
