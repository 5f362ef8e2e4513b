"""HTTP/2 frames in the bytes of a connection, for faults of single messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9
LONG_BYTES = 512
"""A frame of this size has KV among its data."""


async def frames_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The preface of a client, and the frames of either side, each whole."""
    waiting = b""
    while chunk := await reader.read(65536):
        waiting += chunk
        if waiting.startswith(PREFACE):
            yield PREFACE
            waiting = waiting[len(PREFACE) :]
        while (size := _size(waiting)) <= len(waiting):
            yield waiting[:size]
            waiting = waiting[size:]
    if waiting:
        yield waiting


def _size(waiting: bytes) -> int:
    """The size of the next frame, or more than there is."""
    if len(waiting) < HEADER_BYTES or PREFACE.startswith(waiting):
        return len(waiting) + 1
    return HEADER_BYTES + int.from_bytes(waiting[:3], "big")


def is_data(frame: bytes) -> bool:
    """Whether a frame has data of a call."""
    return len(frame) > HEADER_BYTES and frame[3] == 0


def with_flipped_byte(frame: bytes) -> bytes | None:
    """A long frame of data with one bit changed; None for others."""
    if not is_data(frame) or len(frame) < LONG_BYTES:
        return None
    return frame[:-9] + bytes([frame[-9] ^ 1]) + frame[-8:]
