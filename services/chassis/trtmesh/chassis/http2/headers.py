"""Header blocks: assembled from frames, decoded and encoded (RFC 9113, section 4.3; HPACK is RFC 7541)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from hpack import Decoder, HPACKError
from hpack.table import HeaderTable
from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    PRIORITY,
    ErrorCode,
    Frame,
    Http2ConnectionError,
    without_padding,
)

Fields = tuple[tuple[bytes, bytes], ...]

MAX_HEADER_LIST_SIZE = 2**14
"""Announced to peers."""

MAX_LIST_BYTES = 2 * MAX_HEADER_LIST_SIZE
"""Largest list to decode. Larger lists end the connection; for smaller lists the server can refuse the call with a
status."""

MAX_BLOCK_BYTES = 2**14
"""A larger block is a connection error: skipping the block would corrupt the HPACK state. Every admitted list fits, and
decoding a block takes a few milliseconds at most."""

MAX_SIZE_UPDATES = 2
"""Updates of the table's size before a block (RFC 7541, section 4.2)."""

MAX_REMEMBERED = 4
"""Blocks remembered for a connection and decoded once: similar calls of a client have equal headers."""

MAX_REMEMBERED_SIZE = 2048
"""Largest remembered list, as counted for MAX_HEADER_LIST_SIZE."""

_PRIORITY_BYTES = 5

# hpack logs every header at the level debug, and headers contain secrets.
logging.getLogger("hpack").setLevel(logging.WARNING)


@dataclass(slots=True)
class HeaderBlock:
    """Decoded headers or trailers of a stream."""

    stream_id: int
    end_stream: bool
    fields: Fields
    size: int
    """Size as counted for MAX_HEADER_LIST_SIZE."""


class _WatchedTable(HeaderTable):
    """A dynamic table that notes new entries."""

    has_grown = False

    def add(self, name: bytes, value: bytes) -> None:
        self.has_grown = True
        super().add(name, value)


class HeaderDecoder:
    """Decodes the header blocks of a connection, with their shared HPACK table."""

    def __init__(self) -> None:
        self._hpack = Decoder(max_header_list_size=MAX_LIST_BYTES)
        self._table = self._hpack.header_table = _WatchedTable()
        self._remembered: dict[bytes, tuple[Fields, int]] = {}
        """Blocks and their lists with sizes, valid until the table changes."""
        self._first: Frame | None = None
        self._data = bytearray()
        self._size = 0
        self.expects_continuation = False
        """Whether only a CONTINUATION frame may come next."""

    def headers(self, frame: Frame) -> HeaderBlock | None:
        """Takes a HEADERS frame. Returns the block if complete."""
        data = bytes(without_padding(frame))
        if frame.flags & PRIORITY:
            if len(data) < _PRIORITY_BYTES:
                raise Http2ConnectionError(
                    ErrorCode.FRAME_SIZE_ERROR, "HEADERS frame is shorter than its priority fields"
                )
            data = data[_PRIORITY_BYTES:]
        self._size = 0
        self._count(len(data))
        if frame.flags & END_HEADERS:
            return self._decode(frame, data)
        self._first, self.expects_continuation = frame, True
        self._data[:] = data
        return None

    def continuation(self, frame: Frame) -> HeaderBlock | None:
        """Takes a CONTINUATION frame. Returns the block if complete."""
        first = self._first
        if first is None or first.stream_id != frame.stream_id:
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a HEADERS frame before it"
            )
        # The frame header counts too: empty frames must not continue forever.
        self._count(FRAME_HEADER.size + len(frame.payload))
        self._data += frame.payload
        if not frame.flags & END_HEADERS:
            return None
        self._first, self.expects_continuation = None, False
        return self._decode(first, bytes(self._data))

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > MAX_BLOCK_BYTES:
            raise Http2ConnectionError(
                ErrorCode.ENHANCE_YOUR_CALM, f"header block has more than {MAX_BLOCK_BYTES} bytes"
            )

    def _decode(self, frame: Frame, data: bytes) -> HeaderBlock:
        fields, size = self._remembered.get(data) or self._decoded(data)
        return HeaderBlock(frame.stream_id, bool(frame.flags & END_STREAM), fields, size)

    def _decoded(self, data: bytes) -> tuple[Fields, int]:
        updates = _size_updates(data)
        if updates > MAX_SIZE_UPDATES:
            raise Http2ConnectionError(
                ErrorCode.COMPRESSION_ERROR, f"over {MAX_SIZE_UPDATES} updates of the table's size"
            )
        self._table.has_grown = False
        try:
            fields = tuple((name, value) for name, value in self._hpack.decode(data, raw=True))
        except HPACKError as error:
            # Without the text of the error: headers contain secrets.
            raise Http2ConnectionError(
                ErrorCode.COMPRESSION_ERROR, f"invalid header block: {type(error).__name__}"
            ) from error
        size = sum(len(name) + len(value) + 32 for name, value in fields)
        if updates or self._table.has_grown or len(self._remembered) == MAX_REMEMBERED:
            self._remembered.clear()
        if not self._table.has_grown and size <= MAX_REMEMBERED_SIZE:
            self._remembered[data] = fields, size
        return fields, size


def _size_updates(data: bytes) -> int:
    """Returns the number of size updates at the start of a block, counting no further than the first excess."""
    updates = at = 0
    while updates <= MAX_SIZE_UPDATES and at < len(data) and data[at] & 0xE0 == 0x20:
        updates += 1
        if data[at] & 0x1F == 0x1F:
            at += 1
            while at < len(data) and data[at] & 0x80:
                at += 1
        at += 1
    return updates


def literal_field(name: bytes, value: bytes) -> bytes:
    """A literal field without indexing (RFC 7541, section 6.2.2). Encoded blocks do not depend on the HPACK table and
    can be reused on any connection."""
    return b"\x00" + _string_length(len(name)) + name + _string_length(len(value)) + value


def _string_length(size: int) -> bytes:
    """An integer with a 7-bit prefix (RFC 7541, section 5.1)."""
    if size < 0x7F:
        return bytes((size,))
    rest = size - 0x7F
    data = bytearray((0x7F,))
    while rest >= 0x80:
        data.append(rest & 0x7F | 0x80)
        rest >>= 7
    data.append(rest)
    return bytes(data)
