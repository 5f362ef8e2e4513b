"""Writes messages as they become ready: at once where nothing must wait, else in a task."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

Message = TypeVar("Message")
Message_contra = TypeVar("Message_contra", contravariant=True)


class Sink(Protocol[Message_contra]):
    """A call that takes messages."""

    def write_now(self, message: Message_contra) -> bool:
        """Sends a message, and returns whether: a message that must wait, or the end of the call, needs `write`."""

    async def write(self, message: Message_contra) -> None:
        """Sends a message. Returns once flow control has admitted all bytes."""


class Forwarder(ABC, Generic[Message]):
    """A queue whose messages are written to a sink, in order.

    A callback writes them: to wake a task for each costs as much as a message. The task of `forward` writes what must
    wait.
    """

    _loop: asyncio.AbstractEventLoop
    """Since the first `forward`."""

    def __init__(self) -> None:
        self.closed = False
        """Whether nothing more will be added."""
        self._sink: Sink[Message] | None = None
        self._after: Callable[[], None] | None = None
        self._handed: asyncio.Future[Message | None] | None = None
        """A message for the waiting task, or None to look again."""
        self._planned = False

    @abstractmethod
    def take(self) -> Message | None:
        """Removes and returns the next message, if one is ready."""

    def plan(self) -> None:
        """Has `write_ready` called soon."""
        self._loop.call_soon(self.write_ready)

    def wake(self) -> None:
        """A message may be ready, or the queue is closed."""
        if self._handed is not None and not self._planned:
            self._planned = True
            self.plan()

    async def forward(self, sink: Sink[Message], after: Callable[[], None] | None = None) -> None:
        """Writes until the queue is closed and empty. Calls `after` each message. Raises the error of a write."""
        self._loop = asyncio.get_running_loop()
        self._sink, self._after = sink, after
        try:
            while True:
                message = self.take()
                if message is None:
                    if self.closed:
                        return
                    message = await self._next()
                if message is not None:
                    await sink.write(message)
                    if after is not None:
                        after()
        finally:
            self._sink = self._after = None

    async def _next(self) -> Message | None:
        self._handed = self._loop.create_future()
        try:
            return await self._handed
        finally:
            self._handed = None

    def write_ready(self) -> None:
        """Writes what is ready, up to what must wait."""
        self._planned = False
        handed, sink = self._handed, self._sink
        if handed is None or sink is None or handed.done():
            return
        message = None
        try:
            # The task writes the last message: the end of the call then leaves in the same pass.
            if not self.closed:
                while (message := self.take()) is not None and sink.write_now(message):
                    if self._after is not None:
                        self._after()
                if message is None:
                    return
        except Exception as error:  # noqa: BLE001 - `forward` raises it
            handed.set_exception(error)
            # The error's frames have this one: in a cycle they would keep what they hold.
            del handed
        else:
            handed.set_result(message)
