"""What comes in for one call: its messages, and how much the peer may send."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from trtmesh.chassis.grpc.messages import MessageReader
from trtmesh.chassis.http2.frames import ErrorCode, StreamFailed


class Input:
    """The way in of one call.

    A peer may send one window ahead of its call. A message that is longer is let in whole, once no other waits: so
    at most a window and one message of the largest size are held.
    """

    def __init__(
        self, reader: MessageReader, window_bytes: int, grant: Callable[[int], None]
    ) -> None:
        self._reader = reader
        self._whole_window = self._window = window_bytes
        self._grant = grant
        self._messages: deque[bytes] = deque()
        self._arrived: asyncio.Future[None] | None = None
        self.ended = False
        """Whether the peer has sent its last message."""

    def take(self, size: int, data: bytes) -> None:
        """Takes the payload of a frame that counts `size` bytes. Raises StreamFailed and BadMessage."""
        if self.ended:
            raise StreamFailed(ErrorCode.STREAM_CLOSED, "data came behind the end")
        self._window -= size
        if self._window < 0:
            raise StreamFailed(ErrorCode.FLOW_CONTROL_ERROR, "more data came than was asked for")
        self._messages.extend(self._reader.feed(data))
        self._wake()
        self._widen()

    def end(self) -> None:
        """The peer has sent its last message."""
        self.ended = True
        self._wake()

    async def next(self) -> bytes | None:
        """The next message; None behind the last. Raises BadMessage where the last is cut off."""
        while not self._messages:
            if self.ended:
                self._reader.check_end()
                return None
            self._arrived = asyncio.get_running_loop().create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        message = self._messages.popleft()
        self._widen()
        return message

    def _wake(self) -> None:
        arrived = self._arrived
        if arrived is not None and not arrived.done() and (self._messages or self.ended):
            arrived.set_result(None)

    def _widen(self) -> None:
        """Lets the peer send more, in steps of half a window."""
        if self._messages or self.ended:
            return
        more = self._whole_window + self._reader.missing - self._window
        if more > self._whole_window // 2:
            self._window += more
            self._grant(more)
