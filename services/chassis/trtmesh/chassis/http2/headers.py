"""Header blocks: put together from their frames and decoded (RFC 9113, section 4.3)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hpack import Decoder, HPACKError
from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEAD,
    ConnectionFailed,
    ErrorCode,
    Frame,
    without_padding,
)

Fields = list[tuple[bytes, bytes]]

HEADER_LIST_BYTES = 2**14
"""What peers are told. A larger list is still decoded; a server tells its call why it ends."""

BLOCK_BYTES = 2**16
"""What ends the connection, for headers that are not decoded would spoil those that follow."""

_PRIORITY_BYTES = 5

# It tells every header at the level debug, and headers hold secrets.
logging.getLogger("hpack").setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True)
class HeaderBlock:
    """The headers of a call, or its trailers."""

    stream: int
    ends_stream: bool
    fields: Fields
    size: int


class HeaderBlocks:
    """The blocks of one connection, which share a table."""

    def __init__(self) -> None:
        self._decoder = Decoder(max_header_list_size=BLOCK_BYTES)
        self._first: Frame | None = None
        self._data = bytearray()
        self._taken = 0

    @property
    def open(self) -> bool:
        """Whether the next frame must go on with a block."""
        return self._first is not None

    def begin(self, frame: Frame) -> HeaderBlock | None:
        """Takes a HEADERS frame; the block where that is all of it."""
        data = without_padding(frame)
        if frame.flags & HAS_PRIORITY:
            if len(data) < _PRIORITY_BYTES:
                raise ConnectionFailed(ErrorCode.FRAME_SIZE_ERROR, "a priority is cut off")
            data = data[_PRIORITY_BYTES:]
        self._taken = 0
        self._count(len(data))
        if frame.flags & END_HEADERS:
            return self._whole(frame, data)
        self._first = frame
        self._data[:] = data
        return None

    def go_on(self, frame: Frame) -> HeaderBlock | None:
        """Takes a CONTINUATION frame; the block where it is whole now."""
        first = self._first
        if first is None or first.stream != frame.stream:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a continuation has no beginning")
        # Frames count too, else empty ones could go on for ever.
        self._count(HEAD.size + len(frame.payload))
        self._data += frame.payload
        if not frame.flags & END_HEADERS:
            return None
        self._first = None
        return self._whole(first, bytes(self._data))

    def _count(self, size: int) -> None:
        self._taken += size
        if self._taken > BLOCK_BYTES:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long")

    def _whole(self, frame: Frame, data: bytes) -> HeaderBlock:
        try:
            fields: Fields = [(name, value) for name, value in self._decoder.decode(data, raw=True)]
        except HPACKError as error:
            # Only the kind of error: its text may quote the headers, which hold secrets.
            raise ConnectionFailed(
                ErrorCode.COMPRESSION_ERROR, f"headers cannot be read: {type(error).__name__}"
            ) from error
        size = sum(len(name) + len(value) + 32 for name, value in fields)
        return HeaderBlock(frame.stream, bool(frame.flags & END_STREAM), fields, size)
