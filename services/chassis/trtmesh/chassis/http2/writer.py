"""What goes out on one connection. Frames of one pass of the event loop leave in one write, data only as far as the
peer's windows are open."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable

from trtmesh.chassis.http2.frames import (
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW_BYTES,
    LEAST_FRAME_BYTES,
    MOST_WINDOW_BYTES,
    ConnectionFailed,
    ErrorCode,
    Kind,
    StreamFailed,
    frame,
    frame_head,
    reset,
)

MOST_PASS_BYTES = 2**18
"""What one pass of the event loop gives the transport, and what the transport may hold before writers wait."""

MOST_UNREAD_BYTES = 2**22
"""What may wait for a peer that sends and does not read: answers to control frames, heads and ends of calls. No window
counts those."""

_MESSAGE_HEAD = struct.Struct(">HBBBIBI")
"""The head of a DATA frame and the prefix of the message that it holds whole."""

_PREFIX_BYTES = 5

_NO_TABLE = b"\x20"
"""Sets the size of a table to 0, at the beginning of a header block (RFC 7541, sections 4.2 and 6.3)."""


class OutStream:
    """The way out of one call."""

    __slots__ = ("drained", "end", "number", "unsent", "window")

    def __init__(self, number: int, window: int) -> None:
        self.number = number
        self.window = window
        self.unsent = bytearray()
        """What the windows or the connection do not take yet."""
        self.end: bytes | None = None
        """Frames that end the stream, behind what is unsent."""
        self.drained: asyncio.Future[None] | None = None
        """What those wait for who wait until nothing is unsent."""

    def tell_drained(self) -> None:
        """Wakes those who wait."""
        if self.drained is not None:
            self.drained.set_result(None)
            self.drained = None


class Output:
    """The way out of one connection."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        transport.set_write_buffer_limits(high=MOST_PASS_BYTES)
        self._frames: list[bytes] = []
        self._bytes = 0
        self._flushing = False
        self._paused = False
        self._closed = False
        self._window = FIRST_WINDOW_BYTES
        self._first_window = FIRST_WINDOW_BYTES
        self._frame_bytes = LEAST_FRAME_BYTES
        self._block_start = b""
        self._ready: dict[OutStream, None] = {}
        """Streams with data that their own windows take, in the order of their turns."""

    def open(self, number: int) -> OutStream:
        """The way out of a new call."""
        return OutStream(number, self._first_window)

    def put(self, data: bytes) -> None:
        """Sends frames that no window counts; nothing once it is closed."""
        if self._closed:
            return
        self._frames.append(data)
        self._bytes += len(data)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def send_head(self, stream: OutStream, block: bytes) -> None:
        """Sends what a call begins with."""
        self.put(self._headers(0, stream, block))

    def send(self, stream: OutStream, message: bytes) -> None:
        """Sends a message, or as much of it as the windows take; `stream.unsent` is not empty then."""
        size = len(message)
        whole = size + _PREFIX_BYTES
        if (
            whole <= stream.window
            and whole <= self._window
            and whole <= self._frame_bytes
            and self._bytes < MOST_PASS_BYTES
            and not (self._paused or self._ready or stream.unsent)
        ):
            stream.window -= whole
            self._window -= whole
            head = _MESSAGE_HEAD.pack(whole >> 8, whole & 0xFF, 0, 0, stream.number, 0, size)
            self.put(head + message)
            return
        stream.unsent += b"\x00" + size.to_bytes(4)
        stream.unsent += message
        self._ready[stream] = None
        self._pump()

    def finish(self, stream: OutStream, block: bytes, *, half_closed: bool) -> None:
        """Ends a response with trailers, behind what is unsent; `half_closed` says whether the request has ended."""
        end = self._headers(END_STREAM, stream, block)
        if not half_closed:
            # The client may stop sending (RFC 9113, section 8.1).
            end += reset(stream.number, ErrorCode.NO_ERROR)
        self._end(stream, end)

    def half_close(self, stream: OutStream) -> None:
        """Ends a request, behind what is unsent."""
        self._end(stream, frame(Kind.DATA, END_STREAM, stream.number))

    def _end(self, stream: OutStream, end: bytes) -> None:
        if stream.unsent:
            stream.end = end
        else:
            self.put(end)

    def reset(self, stream: OutStream, code: ErrorCode) -> None:
        """Ends a stream at once; what is unsent of it is dropped."""
        self.forget(stream)
        self.put(reset(stream.number, code))

    def forget(self, stream: OutStream) -> None:
        """Drops what is unsent of a stream that has ended."""
        stream.unsent.clear()
        stream.end = None
        self._ready.pop(stream, None)
        stream.tell_drained()

    async def drain(self, stream: OutStream) -> None:
        """Returns when nothing is unsent. Several may wait, and what is unsent stays when they are cancelled."""
        while stream.unsent:
            if stream.drained is None:
                stream.drained = self._loop.create_future()
            await asyncio.shield(stream.drained)

    def widen(self, more: int) -> None:
        """The peer takes so many bytes more on all streams together."""
        self._window += more
        if self._window > MOST_WINDOW_BYTES:
            raise ConnectionFailed(ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
        self._pump()

    def widen_stream(self, stream: OutStream, more: int) -> None:
        """The peer takes so many bytes more on one stream."""
        stream.window += more
        if stream.window > MOST_WINDOW_BYTES:
            raise StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "the window is too large")
        if stream.unsent and stream.window > 0:
            self._ready[stream] = None
            self._pump()

    def set_first_window(self, size: int, streams: Iterable[OutStream]) -> None:
        """The peer changes the first window of each stream; those that are open change by the difference."""
        more, self._first_window = size - self._first_window, size
        try:
            for stream in streams:
                self.widen_stream(stream, more)
        except StreamFailed as error:
            raise ConnectionFailed(error.code, str(error)) from error

    def shrink_table(self) -> None:
        """The peer keeps less of a table of headers than is usual, and waits to read that this is known."""
        self._block_start = _NO_TABLE

    def set_frame_bytes(self, size: int) -> None:
        """The peer takes frames of so many bytes."""
        self._frame_bytes = size

    def pause(self) -> None:
        """The connection takes no more for now."""
        self._paused = True

    def resume(self) -> None:
        """The connection takes more."""
        self._paused = False
        self._pump()

    def close(self) -> None:
        """Sends what was put, and nothing after it."""
        self.flush()
        self.discard()

    def discard(self) -> None:
        """Sends nothing any more."""
        self._closed = True
        self._frames.clear()
        self._ready.clear()

    def flush(self) -> None:
        """Gives the transport what was put; cuts a peer off that does not read."""
        self._flushing = False
        frames, self._frames, self._bytes = self._frames, [], 0
        if frames:
            self._transport.write(b"".join(frames))
            if self._paused and self._transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
                self._transport.abort()
        if self._ready:
            self._pump()

    def _headers(self, flags: int, stream: OutStream, block: bytes) -> bytes:
        return frame(Kind.HEADERS, END_HEADERS | flags, stream.number, self._block_start + block)

    def _pump(self) -> None:
        """Sends what waits, a frame of each stream in turn."""
        while (
            self._ready and self._window > 0 and self._bytes < MOST_PASS_BYTES and not self._paused
        ):
            stream = next(iter(self._ready))
            del self._ready[stream]
            size = min(len(stream.unsent), stream.window, self._window, self._frame_bytes)
            if size <= 0:
                continue
            stream.window -= size
            self._window -= size
            self.put(frame_head(Kind.DATA, 0, stream.number, size) + stream.unsent[:size])
            del stream.unsent[:size]
            if not stream.unsent:
                if stream.end is not None:
                    self.put(stream.end)
                stream.tell_drained()
            elif stream.window > 0:
                self._ready[stream] = None
