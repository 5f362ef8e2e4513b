"""HTTP/2 frames: how they are taken apart and put together (RFC 9113, sections 3.4, 4 and 6)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client's connection begins with."""

HEAD = struct.Struct(">HBBBI")
"""Length (24 bits), type, flags, stream id (31 bits)."""

LEAST_FRAME_BYTES = 2**14
"""The size that every peer takes."""

MOST_FRAME_BYTES = 2**24 - 1
FIRST_WINDOW_BYTES = 2**16 - 1
"""A window before anybody said anything else."""

MOST_WINDOW_BYTES = 2**31 - 1
USUAL_TABLE_BYTES = 4096
"""Of a table of headers before anybody said anything else."""


class Kind(IntEnum):
    """Types of frames."""

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
HAS_PRIORITY = 0x20


class Setting(IntEnum):
    """Parameters of a SETTINGS frame."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113, section 7)."""

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


class ConnectionFailed(Exception):
    """The peer broke a rule that concerns the whole connection, which ends."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamFailed(Exception):
    """The peer broke a rule that concerns one stream, which ends."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Frame(NamedTuple):
    """One frame as it was received."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class FrameReader:
    """Takes a connection's bytes apart, whatever pieces they come in; `preface` is what they begin with."""

    def __init__(self, most_bytes: int, preface: bytes) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        self._preface = preface

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole now. Raises ConnectionFailed for one too long, and for what is no HTTP/2."""
        buffer = self._buffer
        buffer += data
        at = 0
        if preface := self._preface:
            if not preface.startswith(buffer[: len(preface)]):
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "no HTTP/2 client speaks here")
            if len(buffer) < len(preface):
                return
            self._preface = b""
            at = len(preface)
        try:
            while len(buffer) - at >= HEAD.size:
                high, low, kind, flags, stream = HEAD.unpack_from(buffer, at)
                size = high << 8 | low
                if size > self._most_bytes:
                    raise ConnectionFailed(
                        ErrorCode.FRAME_SIZE_ERROR,
                        f"a frame has {size} bytes, and at most {self._most_bytes} are taken",
                    )
                end = at + HEAD.size + size
                if len(buffer) < end:
                    return
                payload = bytes(buffer[at + HEAD.size : end])
                at = end
                yield Frame(kind, flags, stream & MOST_WINDOW_BYTES, payload)
        finally:
            del buffer[:at]


def frame_head(kind: int, flags: int, stream: int, size: int) -> bytes:
    """The nine bytes before a payload of so many bytes."""
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return frame_head(kind, flags, stream, len(payload)) + payload


def settings(values: dict[Setting, int]) -> bytes:
    """A SETTINGS frame."""
    payload = b"".join(struct.pack(">HI", name, value) for name, value in values.items())
    return frame(Kind.SETTINGS, 0, 0, payload)


def parse_settings(received: Frame) -> Iterator[tuple[int, int]]:
    """The values of a SETTINGS frame. Raises ConnectionFailed for those that nobody may send."""
    if received.stream or len(received.payload) % 6:
        raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "settings are cut off")
    for name, value in struct.iter_unpack(">HI", received.payload):
        if name == Setting.INITIAL_WINDOW_SIZE and value > MOST_WINDOW_BYTES:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "the first window is too large")
        if name == Setting.MAX_FRAME_SIZE and not LEAST_FRAME_BYTES <= value <= MOST_FRAME_BYTES:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "the frame size is out of range")
        if name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "enable_push is neither 0 nor 1")
        yield name, value


def window_update(stream: int, more: int) -> bytes:
    """Lets the peer send so many bytes more, on one stream or, for stream 0, on all together."""
    return frame(Kind.WINDOW_UPDATE, 0, stream, more.to_bytes(4))


def reset(stream: int, code: ErrorCode) -> bytes:
    """Ends a stream at once."""
    return frame(Kind.RST_STREAM, 0, stream, code.to_bytes(4))


def go_away(last_stream: int, code: ErrorCode, why: str = "") -> bytes:
    """Says that no stream after `last_stream` is served any more."""
    payload = last_stream.to_bytes(4) + code.to_bytes(4) + why.encode()
    return frame(Kind.GOAWAY, 0, 0, payload)


def without_padding(received: Frame) -> bytes:
    """The payload of a DATA or HEADERS frame. Raises ConnectionFailed for padding that is longer than it."""
    if not received.flags & PADDED:
        return received.payload
    payload = received.payload
    if not payload or payload[0] >= len(payload):
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "padding is longer than its frame")
    return payload[1 : len(payload) - payload[0]]
