"""Which frames must end a connection, by RFC 9113 and without the code under test.

Says nothing about limits, states of streams, or errors of a single stream: what is not found here may end a connection
all the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from hpack import Decoder, HPACKError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
ACK, END_HEADERS, PADDED, HAS_PRIORITY = 0x1, 0x4, 0x8, 0x20

ON_STREAMS = {DATA, HEADERS, PRIORITY, RST_STREAM, CONTINUATION}
ON_THE_CONNECTION = {SETTINGS, PING, GOAWAY}
SIZES = {RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}


class Received(NamedTuple):
    """A frame."""

    kind: int
    flags: int
    stream: int
    payload: bytes


def broken(data: bytes) -> str:
    """Why a connection with these whole frames must end; '' if nothing here says so."""
    decoder = Decoder()
    first: Received | None = None
    block = b""
    for frame in _frames(data.removeprefix(PREFACE)):
        if problem := _broken_alone(frame):
            return problem
        if (frame.kind == CONTINUATION) != (first is not None):
            return "a header block is interrupted, or continued without a beginning"
        if frame.kind not in (HEADERS, CONTINUATION):
            continue
        if first is not None and first.stream != frame.stream:
            return "a header block is continued on another stream"
        block += _content(frame)
        first = first or frame
        if frame.flags & END_HEADERS:
            try:
                decoder.decode(block, raw=True)
            except HPACKError as error:
                return f"a header block is invalid: {error}"
            first, block = None, b""
    return ""


def _frames(data: bytes) -> Iterator[Received]:
    at = 0
    while at < len(data):
        head, flags, stream = struct.unpack_from(">IBI", data, at)
        end = at + 9 + (head >> 8)
        yield Received(head & 0xFF, flags, stream & (2**31 - 1), data[at + 9 : end])
        at = end


def _broken_alone(frame: Received) -> str:
    kind, flags, stream, payload = frame
    size = len(payload)
    if kind == PUSH_PROMISE:
        return "PUSH_PROMISE, which nobody allowed"
    if (kind in ON_STREAMS and not stream) or (kind in ON_THE_CONNECTION and stream):
        return f"a frame of type {kind} on stream {stream}"
    if size != SIZES.get(kind, size) or (kind == GOAWAY and size < 8):
        return f"a frame of type {kind} with {size} bytes"
    if kind == WINDOW_UPDATE and not stream and not int.from_bytes(payload) & (2**31 - 1):
        return "a WINDOW_UPDATE of nothing"
    if kind in (DATA, HEADERS) and flags & PADDED and (not payload or payload[0] >= size):
        return "padding longer than its frame"
    if kind == HEADERS and flags & HAS_PRIORITY and _unpadded(frame) < 5:
        return "HEADERS shorter than their priority"
    return _broken_settings(frame) if kind == SETTINGS else ""


def _unpadded(frame: Received) -> int:
    """Bytes without the padding and its length."""
    padded = frame.flags & PADDED
    return len(frame.payload) - (1 + frame.payload[0] if padded else 0)


def _content(frame: Received) -> bytes:
    """The part of a header block in a frame."""
    if frame.kind == CONTINUATION:
        return frame.payload
    start = 1 if frame.flags & PADDED else 0
    content = frame.payload[start : start + _unpadded(frame)]
    return content[5:] if frame.flags & HAS_PRIORITY else content


def _broken_settings(frame: Received) -> str:
    size = len(frame.payload)
    if size % 6 or (frame.flags & ACK and size):
        return f"SETTINGS with {size} bytes"
    for name, value in struct.iter_unpack(">HI", frame.payload):
        if (
            (name == 2 and value > 1)
            or (name == 4 and value >= 2**31)
            or (name == 5 and not 2**14 <= value < 2**24)
        ):
            return f"setting {name} is {value}"
    return ""
