"""The sending side of a connection: a write per pass of the event loop, DATA within the peer's windows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    FRAME_HEADER,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW_SIZE,
    MIN_MAX_FRAME_SIZE,
    Buffer,
    ErrorCode,
    FrameType,
    Http2ConnectionError,
    Http2StreamError,
    frame,
    frame_header,
    rst_stream,
)

MAX_PASS_BYTES = 2**18
"""Limit of bytes written in a pass of the event loop, and of bytes buffered by the transport before writers wait."""

MAX_DATA_SIZE = 2**16
"""Largest DATA frame, even if the peer admits more: a single frame must not fill a pass or count as unread bytes."""

MAX_BULK_DATA_SIZE = 2**20
"""Largest DATA frame of a stream with large messages in pieces, if the peer admits so much."""

MIN_PIECE_BYTES = 2**13
"""Frames and pieces of this size or more on average are given to the transport without joining them."""

MAX_UNREAD_BYTES = 2**22
"""Limit of buffered bytes outside flow control, against peers sending without reading."""

_pack_header = FRAME_HEADER.pack

_EMPTY_HEADER_TABLE = b"\x20"
"""Dynamic table size update to 0 at the start of a header block (RFC 7541, sections 4.2 and 6.3)."""


class SendBuffer:
    """A queue of bytes, without copies."""

    __slots__ = ("_pieces", "size")

    def __init__(self) -> None:
        self._pieces: deque[Buffer] = deque()
        self.size = 0

    def append(self, data: Buffer) -> None:
        """Adds bytes. Their memory must not change until sent."""
        if data:
            self._pieces.append(data)
            self.size += len(data)

    def take(self, size: int) -> list[Buffer]:
        """Removes the first `size` bytes."""
        taken: list[Buffer] = []
        self.size -= size
        while size:
            piece = self._pieces.popleft()
            if len(piece) > size:
                view = memoryview(piece)
                piece = view[:size]
                self._pieces.appendleft(view[size:])
            taken.append(piece)
            size -= len(piece)
        return taken

    def clear(self) -> None:
        self._pieces.clear()
        self.size = 0


@dataclass(slots=True, eq=False)
class SendStream:
    """The sending half of a stream."""

    stream_id: int
    window: int
    full_window: int
    """The window after the last WINDOW_UPDATE, before any DATA since."""
    unsent: SendBuffer = field(default_factory=SendBuffer)
    """Data waiting for a window or for the transport."""
    max_data_size: int = MAX_DATA_SIZE
    """Largest DATA frame."""
    trailing: bytes | None = None
    """The last frames of the stream, sent after `unsent`."""
    drained: asyncio.Future[None] | None = None
    """Done when `unsent` is empty; None without a waiter."""

    def wake_drained(self) -> None:
        if self.drained is not None:
            self.drained.set_result(None)
            self.drained = None


class FrameWriter:
    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_PASS_BYTES)
        self._frames: list[Buffer] = []
        self._bytes = 0
        self._flush_planned = False
        self.paused = False
        """Whether the transport's buffer is full."""
        self._closed = False
        self._window = self._full_window = self._granted = INITIAL_WINDOW_SIZE
        self._initial_window = INITIAL_WINDOW_SIZE
        self._max_frame_size = MIN_MAX_FRAME_SIZE
        self._block_prefix = b""
        self._sendable: dict[SendStream, None] = {}
        """Streams with unsent data and an open window, in round-robin order."""

    def open_stream(self, stream_id: int) -> SendStream:
        return SendStream(stream_id, self._initial_window, self._initial_window)

    def send(self, frames: bytes) -> None:
        """Sends frames outside flow control. After `close` they are dropped."""
        self._queue((frames,), len(frames))

    def _queue(self, frames: Iterable[Buffer], size: int) -> None:
        if self._closed:
            return
        self._frames += frames
        self._bytes += size
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self.flush)

    def send_headers(self, stream: SendStream, block: bytes) -> None:
        headers = self._headers(0, stream, block)
        self._queue((headers,), len(headers))

    def send_data(self, stream: SendStream, prefix: bytes, data: bytes) -> None:
        """Sends `prefix + data`. The part beyond the windows stays in `stream.unsent`."""
        if not self.send_whole(stream, prefix, data):
            self.send_pieces(stream, (prefix, data))

    def send_whole(self, stream: SendStream, prefix: bytes, data: bytes) -> bool:
        """Sends `prefix + data` in a frame, and returns whether: not beyond the windows, nor before other data."""
        size = len(prefix) + len(data)
        if (
            size <= stream.window
            and size <= self._window
            and size <= self._max_frame_size
            and size <= MAX_DATA_SIZE
            and self._bytes < MAX_PASS_BYTES
            and not (self.paused or self._sendable or stream.unsent.size or self._closed)
        ):
            # Every token passes here: `send` is inlined, and the type DATA is 0.
            stream.window -= size
            self._window -= size
            self._frames.append(_pack_header(size << 8, 0, stream.stream_id) + prefix + data)
            self._bytes += size
            if not self._flush_planned:
                self._flush_planned = True
                self._loop.call_soon(self.flush)
            return True
        return False

    def send_pieces(self, stream: SendStream, pieces: Sequence[Buffer]) -> None:
        """Sends joined pieces of data. Their memory must not change until the transport has written everything."""
        for piece in pieces:
            stream.unsent.append(piece)
        self._sendable[stream] = None
        self._pump()

    def send_trailers(self, stream: SendStream, block: bytes, *, reset: bool) -> None:
        """Ends a response after the unsent data. `reset` asks the client to stop sending the request (RFC 9113,
        section 8.1)."""
        trailing = self._headers(END_STREAM, stream, block)
        if reset:
            trailing += rst_stream(stream.stream_id, ErrorCode.NO_ERROR)
        self._finish(stream, trailing)

    def end_stream(self, stream: SendStream) -> None:
        """Half-closes a stream after the unsent data."""
        self._finish(stream, frame(FrameType.DATA, END_STREAM, stream.stream_id))

    def _finish(self, stream: SendStream, trailing: bytes) -> None:
        if stream.unsent.size:
            stream.trailing = trailing
        else:
            self._queue((trailing,), len(trailing))

    def reset_stream(self, stream: SendStream, code: ErrorCode) -> None:
        """Sends RST_STREAM and drops the unsent data."""
        self.drop_unsent(stream)
        self.send(rst_stream(stream.stream_id, code))

    def drop_unsent(self, stream: SendStream) -> None:
        """Forgets the unsent data of a closed stream."""
        stream.unsent.clear()
        stream.trailing = None
        self._sendable.pop(stream, None)
        stream.wake_drained()

    async def drain(self, stream: SendStream) -> None:
        """Waits until no data is unsent. Several tasks may wait; cancelling a task keeps the data."""
        while stream.unsent.size:
            if stream.drained is None:
                stream.drained = self._loop.create_future()
            await asyncio.shield(stream.drained)

    @property
    def data_bytes(self) -> int:
        """Bytes of DATA sent so far."""
        return self._granted - self._window

    def increment_window(self, increment: int) -> bool:
        """Applies the connection's WINDOW_UPDATE. Returns whether DATA was sent since the previous. Raises
        Http2ConnectionError."""
        needed = self._window < self._full_window
        self._window += increment
        self._full_window = self._window
        self._granted += increment
        if self._window > MAX_WINDOW_SIZE:
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "window exceeds 2^31 - 1")
        self._pump()
        return needed

    def increment_stream_window(self, stream: SendStream, increment: int) -> bool:
        """Applies a stream's WINDOW_UPDATE. Returns whether DATA was sent since the previous. Raises
        Http2StreamError."""
        needed = stream.window < stream.full_window
        stream.window += increment
        stream.full_window = stream.window
        if stream.window > MAX_WINDOW_SIZE:
            raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR, "window exceeds 2^31 - 1")
        if stream.unsent.size and stream.window > 0:
            self._sendable[stream] = None
            self._pump()
        return needed

    def set_initial_window_size(self, size: int, streams: Iterable[SendStream]) -> None:
        """Applies INITIAL_WINDOW_SIZE, to open streams by the difference. Raises Http2ConnectionError."""
        increment, self._initial_window = size - self._initial_window, size
        try:
            for stream in streams:
                self.increment_stream_window(stream, increment)
        except Http2StreamError as error:
            raise Http2ConnectionError(error.code, str(error)) from error

    def set_max_frame_size(self, size: int) -> None:
        """Applies MAX_FRAME_SIZE."""
        self._max_frame_size = size

    def acknowledge_header_table_size(self) -> None:
        """Confirms a smaller HPACK table in every header block: this side uses no table entries."""
        self._block_prefix = _EMPTY_HEADER_TABLE

    def pause(self) -> None:
        """The transport's buffer is full."""
        self.paused = True

    def resume(self) -> None:
        """The transport's buffer has room."""
        self.paused = False
        self._pump()

    def close(self) -> None:
        """Flushes and drops everything sent later."""
        self.flush()
        self.abandon()

    def abandon(self) -> None:
        """Drops everything queued or sent later."""
        self._closed = True
        self._frames.clear()
        self._sendable.clear()

    def flush(self) -> None:
        """Gives the queued frames to the transport. Aborts the connection of a peer sending without reading."""
        self._flush_planned = False
        frames, size = self._frames, self._bytes
        self._frames, self._bytes = [], 0
        if frames:
            if size < len(frames) * MIN_PIECE_BYTES:
                self._transport.write(b"".join(frames))
            else:
                self._transport.writelines(frames)
            if self.paused and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
                self._transport.abort()
        if self._sendable:
            self._pump()

    def _headers(self, flags: int, stream: SendStream, block: bytes) -> bytes:
        block = self._block_prefix + block
        length_and_type = len(block) << 8 | FrameType.HEADERS
        return _pack_header(length_and_type, END_HEADERS | flags, stream.stream_id) + block

    def _pump(self) -> None:
        """Sends unsent data, a frame of each stream in turn."""
        while (
            self._sendable and self._window > 0 and self._bytes < MAX_PASS_BYTES and not self.paused
        ):
            stream = next(iter(self._sendable))
            del self._sendable[stream]
            limit = min(stream.max_data_size, self._max_frame_size)
            size = min(stream.unsent.size, stream.window, self._window, limit)
            if size <= 0:
                continue
            stream.window -= size
            self._window -= size
            header = frame_header(FrameType.DATA, 0, stream.stream_id, size)
            self._queue((header, *stream.unsent.take(size)), len(header) + size)
            if not stream.unsent.size:
                if stream.trailing is not None:
                    self.send(stream.trailing)
                stream.wake_drained()
            elif stream.window > 0:
                self._sendable[stream] = None
