"""Output waiting for a stream. Items added during a write, or in a burst within a few passes of the event loop, share a
message."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trtmesh.chassis.forwarding import Forwarder

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

Message = TypeVar("Message")
Item = TypeVar("Item")


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
