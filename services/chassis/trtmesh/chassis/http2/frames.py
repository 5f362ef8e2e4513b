"""The wire format of HTTP/2: preface, frames, settings and error codes (RFC 9113, sections 3.4, 4, 6 and 7)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"
"""Bytes in memory. A memoryview has a single dimension of bytes."""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The first bytes of a client."""

TLS_HANDSHAKE = b"\x16\x03"
"""The first bytes of a client over TLS."""

FRAME_HEADER = struct.Struct(">IBI")
"""Length (24 bits) and type (8 bits), flags, stream identifier (31 bits)."""

MAX_CONTROL_FRAME_SIZE = 2**15
"""Largest received frame other than DATA, kept in memory until complete."""

MIN_MAX_FRAME_SIZE = 2**14
"""The smallest and initial value of MAX_FRAME_SIZE."""

MAX_MAX_FRAME_SIZE = 2**24 - 1
INITIAL_WINDOW_SIZE = 2**16 - 1
"""The initial flow-control window of a connection, and of a stream unless changed by SETTINGS."""

MAX_WINDOW_SIZE = 2**31 - 1
INITIAL_HEADER_TABLE_SIZE = 4096
STREAM_ID_MASK = 2**31 - 1


class FrameType(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


ACK = END_STREAM = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY = 0x20


class Setting(IntEnum):
    """Parameters of a SETTINGS frame."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Error codes of RST_STREAM and GOAWAY."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11

    @classmethod
    def parse(cls, payload: bytes) -> ErrorCode:
        """Reads four bytes; an unknown code counts as INTERNAL_ERROR (RFC 9113, section 7)."""
        try:
            return cls(int.from_bytes(payload))
        except ValueError:
            return cls.INTERNAL_ERROR


class Http2Error(Exception):
    """The peer violated the protocol."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Http2ConnectionError(Http2Error):
    """A connection error: GOAWAY, then close (RFC 9113, section 5.4.1)."""


class Http2StreamError(Http2Error):
    """A stream error: RST_STREAM, and other streams continue (RFC 9113, section 5.4.2)."""


@dataclass(slots=True)
class Frame:
    type: int
    flags: int
    stream_id: int
    payload: bytes


@dataclass(slots=True)
class Data:
    """A received DATA frame, or a part."""

    type: int
    flags: int
    stream_id: int
    payload: Buffer
    """Valid until the connection reads again."""


class FrameReader:
    """Splits the received bytes of a connection into frames, after the expected `preface`.

    Large frames are not kept: DATA without padding is passed on in pieces.
    """

    def __init__(self, max_frame_size: int, preface: bytes) -> None:
        self._max_frame_size = max_frame_size
        self._preface = preface
        self._buffer = bytearray()
        """The beginning of a frame, or of the preface."""
        self._flags = 0
        """Of the DATA frame under way."""
        self.data_stream = self.data_missing = 0
        """Stream and missing bytes of the DATA frame under way."""

    @property
    def greeted(self) -> bool:
        """Whether the preface has come."""
        return not self._preface

    @property
    def held(self) -> int:
        """Bytes of an incomplete frame, or of the preface."""
        return len(self._buffer)

    def feed(self, data: Buffer) -> Iterator[Frame | Data]:
        """Yields the frames completed or continued by `data`. Keeps the rest for the next call. Raises
        Http2ConnectionError."""
        if self._preface:
            data = self._after_preface(data)
        at, buffer = 0, self._buffer
        if buffer and not self._preface:
            buffer += data
            data = buffer
        try:
            if self.data_missing and data:
                at = min(self.data_missing, len(data))
                yield self._continued(data[:at])
            while len(data) - at >= FRAME_HEADER.size:
                length_and_type, flags, stream_id = FRAME_HEADER.unpack_from(data, at)
                length, kind = length_and_type >> 8, length_and_type & 0xFF
                if length > self._max_frame_size:
                    raise Http2ConnectionError(
                        ErrorCode.FRAME_SIZE_ERROR,
                        f"frame has {length} bytes but MAX_FRAME_SIZE is {self._max_frame_size}",
                    )
                is_data = kind == FrameType.DATA
                if length > MAX_CONTROL_FRAME_SIZE and not is_data:
                    raise Http2ConnectionError(
                        ErrorCode.ENHANCE_YOUR_CALM,
                        f"frame of type {kind} has over {MAX_CONTROL_FRAME_SIZE} bytes",
                    )
                start = at + FRAME_HEADER.size
                end = start + length
                stream_id &= STREAM_ID_MASK
                if end <= len(data):
                    at = end
                    payload = data[start:end]
                    if is_data:
                        yield Data(kind, flags, stream_id, payload)
                    else:
                        yield Frame(kind, flags, stream_id, bytes(payload))
                elif is_data and not flags & PADDED:
                    at = len(data)
                    self.data_stream, self.data_missing, self._flags = stream_id, length, flags
                    yield self._continued(data[start:])
                else:
                    return
        finally:
            if data is buffer:
                del buffer[:at]
            elif at < len(data):
                buffer += data[at:]

    def _continued(self, payload: Buffer) -> Data:
        """The next bytes of the DATA frame under way."""
        self.data_missing -= len(payload)
        flags = self._flags & ~END_STREAM if self.data_missing else self._flags
        return Data(FrameType.DATA, flags, self.data_stream, payload)

    def _after_preface(self, data: Buffer) -> Buffer:
        """Returns the bytes after the preface: none while incomplete."""
        buffer, preface = self._buffer, self._preface
        buffer += data
        if not preface.startswith(buffer[: len(preface)]):
            secure = buffer.startswith(TLS_HANDSHAKE)
            problem = "the client speaks TLS" if secure else "invalid connection preface"
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, problem)
        if len(buffer) < len(preface):
            return b""
        self._preface = b""
        data = bytes(buffer[len(preface) :])
        buffer.clear()
        return data


def frame_header(kind: int, flags: int, stream_id: int, length: int) -> bytes:
    return FRAME_HEADER.pack(length << 8 | kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return frame_header(kind, flags, stream_id, len(payload)) + payload


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(struct.pack(">HI", name, value) for name, value in values.items())
    return frame(FrameType.SETTINGS, 0, 0, payload)


def window_update(stream_id: int, increment: int) -> bytes:
    """Stream 0 is the connection."""
    return frame(FrameType.WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    return frame(FrameType.RST_STREAM, 0, stream_id, code.to_bytes(4))


def goaway(last_stream_id: int, code: ErrorCode, debug_data: str = "") -> bytes:
    payload = last_stream_id.to_bytes(4) + code.to_bytes(4) + debug_data.encode()
    return frame(FrameType.GOAWAY, 0, 0, payload)


def parse_settings(received: Frame) -> Iterator[tuple[int, int]]:
    """Yields identifiers and values. Raises Http2ConnectionError."""
    if len(received.payload) % 6:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS has an invalid length")
    for name, value in struct.iter_unpack(">HI", received.payload):
        if name == Setting.INITIAL_WINDOW_SIZE and value > MAX_WINDOW_SIZE:
            raise Http2ConnectionError(
                ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE is {value}"
            )
        if name == Setting.MAX_FRAME_SIZE and not MIN_MAX_FRAME_SIZE <= value <= MAX_MAX_FRAME_SIZE:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {value}")
        if name == Setting.ENABLE_PUSH and value > 1:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH is {value}")
        yield name, value


def check_no_stream(received: Frame) -> None:
    """Raises Http2ConnectionError if a frame of the connection names a stream."""
    if received.stream_id:
        raise Http2ConnectionError(
            ErrorCode.PROTOCOL_ERROR, f"frame of type {received.type} on a stream"
        )


def check_length(received: Frame, length: int) -> None:
    """Raises Http2ConnectionError unless the payload has exactly `length` bytes."""
    if len(received.payload) != length:
        raise Http2ConnectionError(
            ErrorCode.FRAME_SIZE_ERROR,
            f"frame of type {received.type} has {len(received.payload)} bytes, not {length}",
        )


def without_padding(received: Frame | Data) -> Buffer:
    """The payload of a DATA or HEADERS frame. Raises Http2ConnectionError for padding longer than the payload."""
    if not received.flags & PADDED:
        return received.payload
    payload = received.payload
    if not payload or payload[0] >= len(payload):
        raise Http2ConnectionError(
            ErrorCode.PROTOCOL_ERROR, "padding is longer than the frame's payload"
        )
    return payload[1 : len(payload) - payload[0]]
