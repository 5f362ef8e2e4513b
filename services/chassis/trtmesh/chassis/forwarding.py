"""Writes messages as they become ready: at once where nothing must wait, else in a task.

An outbox merges items first. Items added during a write, or in a burst within a few passes of the event loop, share a
message.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

Message = TypeVar("Message")
Item = TypeVar("Item")
Message_contra = TypeVar("Message_contra", contravariant=True)

Rest: TypeAlias = Callable[[], Awaitable[None]]
"""What a message leaves to be done and waited for before the next message."""

Receive: TypeAlias = Callable[[Message], Rest | None]
"""Takes a message, without waiting."""


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
        """Writes what is ready, up to what must wait; without a sink, has the task take it."""
        self._planned = False
        handed, sink = self._handed, self._sink
        if handed is None or handed.done():
            return
        message = None
        try:
            # The task writes the last message: the end of the call then leaves in the same pass.
            if sink is not None and not self.closed:
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


MAX_ITEMS = 256
MAX_BYTES = 2**20
"""Limits of a message. A larger item gets a message alone."""

MAX_PASSES = 4
"""Most passes of the event loop for gathering items."""

BURST_SECONDS = 0.003
"""A message soon after another gathers items. A message after a silence leaves at once: the first of a burst, and the
messages of steps."""

ENOUGH_ITEMS = 20
"""Items enough to stop gathering. The peer handles a message in a single pass, and the peer's streams wait
meanwhile."""


@dataclass(slots=True)
class _Batch(Generic[Message]):
    message: Message
    items: int = 0
    bytes: int = 0


class Outbox(Forwarder[Message], Generic[Message, Item]):
    """Merges items into messages, in order, for a single sink.

    Items are built inside their message: protobuf copies a message into another by serializing and parsing, which takes
    milliseconds for the ids of a long text.
    """

    def __init__(
        self,
        new_message: Callable[[], Message],
        items_of: Callable[[Message], Any],
        max_waiting: int | None = None,
    ) -> None:
        """`items_of` is the repeated field with the items, such as `attrgetter("events")`."""
        super().__init__()
        self._new_message = new_message
        self._items_of = items_of
        self._max_waiting = max_waiting
        self._batches: deque[_Batch[Message]] = deque()
        self._waiting = 0
        self._loop = asyncio.get_running_loop()
        self._burst_until = 0.0
        self._room = asyncio.Event()
        self._room.set()

    def add(self, size: int = 0) -> Item:
        """An empty item of about `size` bytes; the caller fills the item before any await."""
        batch = self._batches[-1] if self._batches else None
        if batch is None or batch.items == MAX_ITEMS or batch.bytes + size > MAX_BYTES:
            batch = _Batch(self._new_message())
            self._batches.append(batch)
        batch.items += 1
        batch.bytes += size
        self._waiting += 1
        if self._waiting == self._max_waiting:
            self._room.clear()
        self.wake()
        item: Item = self._items_of(batch.message).add()
        return item

    @property
    def has_room(self) -> bool:
        """Whether fewer than `max_waiting` items wait."""
        return self._max_waiting is None or self._waiting < self._max_waiting

    async def wait_for_room(self) -> None:
        """Waits until fewer than `max_waiting` items wait."""
        await self._room.wait()

    def close(self) -> None:
        """Nothing more will be added."""
        self.closed = True
        self.wake()

    def take(self) -> Message | None:
        if not self._batches:
            return None
        self._burst_until = self._loop.time() + BURST_SECONDS
        batch = self._batches.popleft()
        before, most = self._waiting, self._max_waiting
        self._waiting = before - batch.items
        if most is not None and self._waiting < most <= before:
            self._room.set()
        return batch.message

    def plan(self) -> None:
        if self._loop.time() < self._burst_until:
            self._loop.call_soon(self._gather, MAX_PASSES, 0)
        else:
            self._loop.call_soon(self.write_ready)

    def _gather(self, passes: int, before: int) -> None:
        """Waits for the next pass of the event loop while each adds items, a few times. A burst adds a few in each
        pass, and every message costs a write, and a pass of the peer."""
        if passes and before != self._waiting < ENOUGH_ITEMS:
            self._loop.call_soon(self._gather, passes - 1, self._waiting)
        else:
            self.write_ready()
