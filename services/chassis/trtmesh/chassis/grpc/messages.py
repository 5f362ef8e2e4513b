"""Length-prefixed messages of a gRPC call (gRPC over HTTP/2, "Length-Prefixed-Message")."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterator

import grpc
from trtmesh.chassis.http2.frames import ErrorCode, Http2StreamError

_PREFIX = struct.Struct(">BI")

pack_prefix = _PREFIX.pack
"""Encodes the compressed flag and the length of a message."""

_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's parameter for each supported grpc-encoding."""


class BadMessage(Exception):
    """A received message is invalid; its call ends with `status`."""

    def __init__(self, status: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = status


class MessageReader:
    """Splits the data of a call into messages of at most `max_bytes`, compressed and decompressed."""

    def __init__(self, encoding: str, max_bytes: int) -> None:
        self.encoding = encoding
        """The call's grpc-encoding."""
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self.missing = 0
        """Bytes missing from an incomplete message; 0 if the length is unknown."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the messages that `data` completes. Raises BadMessage."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _PREFIX.size:
                compressed, size = _PREFIX.unpack_from(buffer, at)
                if size > self._max_bytes:
                    raise self._too_large(size)
                end = at + _PREFIX.size + size
                self.missing = max(0, end - len(buffer))
                if self.missing:
                    return
                body = bytes(buffer[at + _PREFIX.size : end])
                at = end
                yield self._decompressed(body) if compressed else body
        finally:
            del buffer[:at]

    def check_end(self) -> None:
        """Raises BadMessage if the data ended inside a message."""
        if self._buffer:
            raise BadMessage(grpc.StatusCode.INTERNAL, "the last message is incomplete")

    def _decompressed(self, body: bytes) -> bytes:
        window_bits = _WINDOW_BITS.get(self.encoding)
        if window_bits is None:
            raise BadMessage(
                grpc.StatusCode.UNIMPLEMENTED,
                f"a message is compressed but grpc-encoding is {self.encoding[:40]!r}; use"
                f" {' or '.join(_WINDOW_BITS)}",
            )
        decompressor = zlib.decompressobj(window_bits)
        try:
            data = decompressor.decompress(body, self._max_bytes + 1)
        except zlib.error as error:
            raise BadMessage(
                grpc.StatusCode.INTERNAL, f"a message cannot be decompressed: {error}"
            ) from error
        if len(data) > self._max_bytes:
            raise self._too_large(len(data))
        if not decompressor.eof:
            raise BadMessage(
                grpc.StatusCode.INTERNAL, "a message cannot be decompressed: it is incomplete"
            )
        return data

    def _too_large(self, size: int) -> BadMessage:
        return BadMessage(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"Received message larger than max ({size} vs. {self._max_bytes})",
        )


class ReceivedMessages:
    """The received messages of one call, bounded by the stream's flow-control window.

    The peer may send one window ahead of the reader. A longer message is admitted whole after all others are read: at
    most a window and a message of the largest size are held.
    """

    def __init__(
        self, reader: MessageReader, window_size: int, send_window_update: Callable[[int], None]
    ) -> None:
        self._reader = reader
        self._window_size = self._window = window_size
        self._send_window_update = send_window_update
        self._messages: deque[bytes] = deque()
        self._changed: asyncio.Future[None] | None = None
        self.ended = False
        """Whether the peer has half-closed the stream."""

    def feed(self, data: bytes, flow_size: int) -> None:
        """Takes data; `flow_size` counts for flow control. Raises Http2StreamError and BadMessage."""
        if self.ended:
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA after END_STREAM")
        self._window -= flow_size
        if self._window < 0:
            raise Http2StreamError(
                ErrorCode.FLOW_CONTROL_ERROR, "DATA exceeds the window of the stream"
            )
        self._messages.extend(self._reader.feed(data))
        self._wake()
        self._update_window()

    def end(self) -> None:
        """No message follows."""
        self.ended = True
        self._wake()

    async def next(self) -> bytes | None:
        """The next message, None after the last. Raises BadMessage for an incomplete message."""
        while not self._messages:
            if self.ended:
                self._reader.check_end()
                return None
            self._changed = asyncio.get_running_loop().create_future()
            try:
                await self._changed
            finally:
                self._changed = None
        message = self._messages.popleft()
        self._update_window()
        return message

    def _wake(self) -> None:
        changed = self._changed
        if changed is not None and not changed.done() and (self._messages or self.ended):
            changed.set_result(None)

    def _update_window(self) -> None:
        """Sends a WINDOW_UPDATE, but only for at least half a window."""
        if self._messages or self.ended:
            return
        increment = self._window_size + self._reader.missing - self._window
        if increment > self._window_size // 2:
            self._window += increment
            self._send_window_update(increment)
