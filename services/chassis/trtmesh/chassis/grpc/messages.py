"""Length-prefixed messages of a gRPC call (gRPC over HTTP/2, "Length-Prefixed-Message")."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TypeAlias

import grpc
from trtmesh.chassis.fair.limits import Account
from trtmesh.chassis.fair.messages import LARGE_BYTES
from trtmesh.chassis.fair.turns import ConnectionQueue
from trtmesh.chassis.forwarding import Receive, Rest
from trtmesh.chassis.http2.frames import Buffer, ErrorCode, Http2StreamError

_PREFIX = struct.Struct(">BI")

pack_prefix = _PREFIX.pack
"""Encodes the compressed flag and the length of a message."""

Message: TypeAlias = "bytes | bytearray | memoryview"
"""A message: a memoryview if received into given memory, a bytearray if large or inflated, else bytes."""

Memory: TypeAlias = "Callable[[int], memoryview]"
"""Gives memory for a message of a size. The memory belongs to the reader of the message."""

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's parameter for each supported grpc-encoding."""

TAKING_SECONDS = 0.001
"""Time for messages of a call that arrived together; then others have their turn."""

INFLATED_BYTES = 2**16
"""Bytes decompressed at once: a fraction of a millisecond."""


class BadMessage(Exception):
    """A received message is invalid. The call ends with `status`."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageReader:
    """Splits the data of a call into messages of at most `max_bytes`, compressed and decompressed."""

    def __init__(self, encoding: str, max_bytes: int, memory: Memory | None = None) -> None:
        """Large uncompressed messages are received into `memory`, if given."""
        self.encoding = encoding
        """The call's grpc-encoding."""
        self.max_bytes = max_bytes
        self.complete = False
        """Whether a whole message is there."""
        self.missing = 0
        """Bytes missing from the first message: negative if more follows, 0 if the length is unknown."""
        self.size = 0
        """Bytes in memory."""
        self._message_size = 0
        """Size of the first message in the buffer; 0 if unknown."""
        self._memory = memory
        self._large: memoryview | None = None
        """Memory of the first message, if large."""
        self._large_missing = 0
        self._buffer = bytearray()
        """Bytes after the first message, or all bytes without a large message."""

    @property
    def has_memory(self) -> bool:
        """Whether large messages are received into given memory."""
        return self._memory is not None

    @property
    def room(self) -> memoryview | None:
        """Memory for the missing bytes of a large message. `add` does not copy bytes already there."""
        if self._large is None or not self._large_missing:
            return None
        return self._large[-self._large_missing :]

    def whole(self, data: Buffer) -> bytes | None:
        """Returns the message, if nothing is held and `data` is a small, uncompressed message, the usual case; else
        None."""
        if self.size or self._large is not None or not _PREFIX.size <= len(data) < LARGE_BYTES:
            return None
        compressed, size = _PREFIX.unpack_from(data)
        if compressed or _PREFIX.size + size != len(data) or size > self.max_bytes:
            return None
        return bytes(data[_PREFIX.size :])

    def add(self, data: Buffer) -> None:
        """Takes data. Raises BadMessage if a message will be too large."""
        if self._large is not None and self._large_missing:
            data = data[self._fill(self._large, data) :]
        self._buffer += data
        self._measure()
        self._check_size()

    def _fill(self, large: memoryview, data: Buffer) -> int:
        """Takes the next bytes of the large message; returns their number."""
        size = min(self._large_missing, len(data))
        if not (isinstance(data, memoryview) and data.obj is large.obj):
            first = len(large) - self._large_missing
            large[first : first + size] = data[:size]
        self._large_missing -= size
        return size

    def _check_size(self) -> None:
        if self._message_size > self.max_bytes:
            raise too_large(self._message_size, self.max_bytes)

    def _measure(self) -> None:
        """Measures the buffers, after every change."""
        held = self.size = len(self._buffer)
        self._message_size = 0
        if self._large is not None:
            self.size += len(self._large) - self._large_missing
            self.missing = self._large_missing or -held
            self.complete = not self._large_missing
        elif held < _PREFIX.size:
            self.missing, self.complete = 0, False
        else:
            compressed, size = _PREFIX.unpack_from(self._buffer)
            self._message_size = size
            self.missing = _PREFIX.size + size - held
            self.complete = self.missing <= 0
            if (
                self._memory
                and not (self.complete or compressed)
                and (LARGE_BYTES <= size <= self.max_bytes)
            ):
                self._begin_large(size, self._memory)

    def _begin_large(self, size: int, memory: Memory) -> None:
        """Moves the beginning of a large message to memory."""
        first = len(self._buffer) - _PREFIX.size
        self._large, self._large_missing = memory(size), size - first
        self._large[:first] = self._buffer[_PREFIX.size :]
        self._buffer.clear()
        self._measure()

    def clear(self) -> None:
        self._buffer, self._large, self._large_missing = bytearray(), None, 0
        self._measure()

    def take(self) -> tuple[bool, Message]:
        """Removes the complete first message. Returns whether the message is compressed, and the message. Raises
        BadMessage for a message beyond the limit."""
        self._check_size()
        compressed, body = self._large is None and self._buffer[0] != 0, self._take_body()
        self._measure()
        return compressed, body

    def _take_body(self) -> Message:
        if self._large is not None:
            large, self._large = self._large, None
            return large
        buffer, end = self._buffer, len(self._buffer) + self.missing
        if end < LARGE_BYTES:
            body = bytes(buffer[_PREFIX.size : end])
            del buffer[:end]
            return body
        # Copies the bytes behind the message, at most a window: copying the largest message takes 50 ms.
        self._buffer = buffer[end:]
        del buffer[end:]
        del buffer[: _PREFIX.size]
        return buffer

    def check_end(self) -> None:
        """Raises BadMessage if the data ended inside a message."""
        if self._buffer or self._large is not None:
            raise BadMessage(grpc.StatusCode.INTERNAL, "the last message is incomplete")


def too_large(size: int, max_bytes: int) -> BadMessage:
    return BadMessage(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"Received message larger than max ({size} vs. {max_bytes})",
    )


class Inflation:
    """Decompresses a message in turns."""

    def __init__(
        self, body: Message, encoding: str, max_bytes: int, count: Callable[[], None]
    ) -> None:
        """Calls `count` whenever `size` has changed."""
        if encoding == "identity":
            raise BadMessage(
                grpc.StatusCode.INTERNAL,
                "a message has the compressed flag, but the call has no grpc-encoding",
            )
        window_bits = WINDOW_BITS.get(encoding)
        if window_bits is None:
            raise BadMessage(
                grpc.StatusCode.UNIMPLEMENTED,
                f"a message is compressed but grpc-encoding is {encoding[:40]!r}; use"
                f" {' or '.join(WINDOW_BITS)}",
            )
        self._decompressor = zlib.decompressobj(window_bits)
        self._compressed: Message = body
        self._max_bytes = max_bytes
        self._count = count
        self._data = bytearray()
        self._is_wanted = True

    @property
    def size(self) -> int:
        """Bytes in memory, including the copy to be made at the end."""
        return len(self._compressed) + 2 * len(self._data)

    def clear(self) -> None:
        """Forgets everything: nobody reads the message."""
        self._is_wanted = False
        self._compressed, self._data = b"", bytearray()

    def steps(self) -> Generator[None, None, bytearray]:
        """Decompresses a little in each step. Returns the message. Raises BadMessage."""
        while self._is_wanted:
            self._inflate()
            # To make room, this may end the call.
            self._count()
            if self._decompressor.eof and self._is_wanted:
                return self._data
            yield
        raise BadMessage(grpc.StatusCode.CANCELLED, "the call has ended")

    def _inflate(self) -> None:
        """Decompresses a little. Raises BadMessage."""
        try:
            piece = self._decompressor.decompress(self._compressed, INFLATED_BYTES)
        except zlib.error as error:
            raise _not_inflated(str(error)) from error
        self._compressed = self._decompressor.unconsumed_tail
        self._data += piece
        if len(self._data) > self._max_bytes:
            raise too_large(len(self._data), self._max_bytes)
        if not self._decompressor.eof and not piece:
            raise _not_inflated("it is incomplete")


def _not_inflated(why: str) -> BadMessage:
    return BadMessage(grpc.StatusCode.INTERNAL, f"a message cannot be decompressed: {why}")


class ReceivedMessages:
    """The received messages of a call, bounded by the stream's flow-control window.

    The peer may send a window ahead of the reader. A longer message is admitted whole once all others are read, so at
    most a window and a message of the largest size are held. Reading a message joins the parts and decompresses.
    """

    def __init__(
        self,
        reader: MessageReader,
        window_size: int,
        send_window_update: Callable[[int], None],
        queue: ConnectionQueue,
        account: Account,
    ) -> None:
        self._reader = reader
        self._window_size = self._window = window_size
        self._send_window_update = send_window_update
        self._queue = queue
        self._account = account
        self._inflation: Inflation | None = None
        self._ready: deque[tuple[bool, Message]] = deque()
        """Messages split before they are read."""
        self._counted = 0
        self._dropped = False
        self._taken = 0
        self._loop = asyncio.get_running_loop()
        self._changed: asyncio.Future[Rest | None] | None = None
        self._receive: Receive[Message] | None = None
        """Takes messages in the pass in which they arrive."""
        self._most_received = 0
        """Size of the largest of them."""
        self.ended = False
        """Whether the peer has half-closed the stream."""

    def feed(self, data: Buffer, flow_size: int) -> None:
        """Takes data; `flow_size` counts for flow control. Raises Http2StreamError and BadMessage."""
        if self.ended:
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        self._window -= flow_size
        if self._window < 0:
            raise Http2StreamError(
                ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the window of the stream"
            )
        reader = self._reader
        # One at a time: objects for a window of the smallest messages would take many times the memory.
        if not self._ready and (message := reader.whole(data)) is not None:
            self._ready.append((False, message))
            changed = self._changed
            if self._receive is not None and changed is not None and not changed.done():
                # It is not held: the reader takes it in this pass.
                self._queue.arrivals.append(self._hand_over)
                return
            self._counted += len(message)
            self._account.add(len(message))
            if changed is not None:
                self._wake()
            return
        reader.add(data)
        while reader.complete and reader.has_memory:
            # The next message needs memory before arriving.
            self._ready.append(reader.take())
        self._count()
        if not self._dropped:
            if self._ready or reader.complete:
                self._wake()
            self._update_window()

    @property
    def room(self) -> memoryview | None:
        """Memory for the next bytes of a large message."""
        return self._reader.room

    def end(self) -> None:
        """No message follows."""
        self.ended = True
        self._wake()

    @property
    def held(self) -> int:
        """Bytes received and not read."""
        held = self._reader.size
        for _, body in self._ready:
            held += len(body)
        if self._inflation is not None:
            held += self._inflation.size
        return held

    def drop(self) -> None:
        """Frees everything, since nobody will read."""
        self._dropped = True
        reader = self._reader
        if not (reader.size or reader.missing or self._ready or self._inflation):
            return
        reader.clear()
        self._ready.clear()
        if self._inflation is not None:
            self._inflation.clear()
        self._count()

    def _count(self) -> None:
        """Counts the bytes in memory. The account may end this call to make room."""
        if change := self.held - self._counted:
            self._counted += change
            self._account.add(change)

    @property
    def complete(self) -> bool:
        """Whether a message waits."""
        return self._reader.complete or bool(self._ready)

    @property
    def waiting(self) -> bool:
        """Whether `next` need not wait for data."""
        return self.ended or self._reader.complete or bool(self._ready)

    @property
    def several(self) -> bool:
        """Whether at least the beginning of a second message was received."""
        begun = len(self._ready) + (self._reader.size > 0)
        return self._reader.missing < 0 or self._taken + begun > 1

    async def arrived(self) -> int | None:
        """Waits for the next message, and decompresses. Returns the size, or None after the last message. Raises
        BadMessage."""
        while not (self._ready or self._reader.complete):
            if self.ended:
                self._reader.check_end()
                return None
            self._changed = self._loop.create_future()
            try:
                rest = await self._changed
            finally:
                self._changed = None
            if rest is not None:
                await rest()
        if not self._ready:
            self._ready.append(self._reader.take())
        compressed, body = self._ready[0]
        if compressed:
            # The message stays until then: a cancelled reader may return.
            body = await self._inflated(body)
            if not self._dropped:
                self._ready[0] = (False, body)
                self._count()
            if self._dropped:
                raise BadMessage(grpc.StatusCode.CANCELLED, "the call has ended")
        return len(body)

    def take(self) -> Message:
        """Removes and returns the message that `arrived` has waited for."""
        _, body = self._ready.popleft()
        self._taken += 1
        if self._ready or self._reader.size:
            self._count()
        elif self._counted:
            # Nothing is left.
            self._account.add(-self._counted)
            self._counted = 0
        if not self.ended:
            self._update_window()
        return body

    @contextmanager
    def handing_over(self, receive: Receive[Message], most_bytes: int) -> Iterator[None]:
        """In the block, `arrived` passes messages to `receive` in the pass of the event loop in which they arrive, and
        raises its errors. It returns for messages that must wait: for memory, a turn, or as larger than `most_bytes`.
        """
        self._receive, self._most_received = receive, most_bytes
        try:
            yield
        finally:
            self._receive = None

    def _hand_over(self) -> None:
        """Passes on what needs no wait, and wakes the reader for anything else."""
        changed, receive = self._changed, self._receive
        if changed is None or receive is None or changed.done():
            return
        ready, reader, until = self._ready, self._reader, perf_counter() + TAKING_SECONDS
        try:
            while ready or reader.complete:
                if not ready:
                    ready.append(reader.take())
                compressed, message = ready[0]
                if compressed or len(message) > self._most_received or perf_counter() > until:
                    changed.set_result(None)
                    break
                ready.popleft()
                self._taken += 1
                if (rest := receive(message)) is not None:
                    changed.set_result(rest)
                    break
        except Exception as error:  # noqa: BLE001 - `each` raises it
            if not changed.done():
                changed.set_exception(error)
            # The error's frames have this one: in a cycle they would keep what they hold.
            del changed
        if self._counted or ready or reader.size:
            self._count()
        if self._window < self._window_size // 2:
            self._update_window()

    async def _inflated(self, body: Message) -> bytearray:
        reader = self._reader
        self._inflation = Inflation(body, reader.encoding, reader.max_bytes, self._count)
        try:
            return await self._queue.run(self._inflation.steps())
        finally:
            self._inflation.clear()
            self._inflation = None
            self._count()

    def _wake(self) -> None:
        changed = self._changed
        if changed is not None and not changed.done():
            if self._receive is None or self.ended:
                changed.set_result(None)
            else:
                self._queue.arrivals.append(self._hand_over)

    def _update_window(self) -> None:
        """Sends a WINDOW_UPDATE, but only for at least half a window."""
        if self.ended or self._reader.complete or self._ready:
            return
        increment = self._window_size + self._reader.missing - self._window
        if increment > self._window_size // 2:
            self._window += increment
            self._send_window_update(increment)
