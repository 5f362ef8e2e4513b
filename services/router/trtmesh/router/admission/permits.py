"""Takes a permit per item with the request, given back at the end of the item.

An item with a permit runs or waits in the queue of the model, ordered by priority, then arrival. After half of the
longest wait, an item goes before all later items, so a stream of high priorities starves nobody. A request is refused
as a whole unless all items fit. A call in place of another inherits the places of running items.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from trtmesh.chassis.errors import InvalidField, QueueFull, QueueTimeout
from trtmesh.chassis.fair.messages import LARGE_BYTES
from trtmesh.chassis.settings import Settings
from trtmesh.router.placement.rates import Ewma

SHORTEST_RETRY_MS, LONGEST_RETRY_MS = 100, 60_000
UNKNOWN_RETRY_MS = 1000
UNCOUNTED = nullcontext()


class AdmissionLimits(Settings):
    """How many items the router takes on."""

    max_items: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    """Most live items; a request over the limit is refused with QUEUE_FULL, or with INVALID_FIELD if it alone has
    more."""
    max_running_items: Annotated[int, Field(ge=1, le=1_000_000)] = 8192
    """Most running items of a model. More wait in the queue of the model, by priority and arrival, and after half of
    `queue_seconds` by arrival alone."""
    max_queued_items: Annotated[int, Field(ge=0, le=1_000_000)] = 8192
    """Most waiting items of one model; a request over the limit is refused with QUEUE_FULL."""
    queue_seconds: Annotated[float, Field(gt=0, le=86400)] = 60.0
    """Longest wait of an item in its model's queue, then QUEUE_TIMEOUT."""
    max_request_bytes: Annotated[int, Field(ge=1)] = 2**30
    """Most bytes of all requests of 128 KiB or more, from their arrival to their end; a request over the limit is
    refused with QUEUE_FULL, or with INVALID_FIELD if it alone has more."""


class RequestBytes:
    """Counts the bytes of all large requests of a router; `max_items` bounds the smaller ones."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def counting(self, size: int) -> AbstractContextManager[None]:
        """Returns the block of a request of so many bytes, from arrival to end. Entering raises QueueFull, or
        InvalidField for more than ever fit."""
        return UNCOUNTED if size < LARGE_BYTES else self._counting(size)

    @contextmanager
    def _counting(self, size: int) -> Iterator[None]:
        if size > self._limit:
            raise InvalidField.of(
                "request", f"{size} bytes", f"at most {self._limit} (admission.max_request_bytes)"
            )
        if self.held + size > self._limit:
            raise QueueFull.of(
                self._limit,
                f"large requests have {self.held} bytes and this one {size}; all may have {self._limit}"
                " (admission.max_request_bytes)",
            )
        self.held += size
        try:
            yield
        finally:
            self.held -= size


@dataclass(slots=True, eq=False)
class Permit:
    """An item's right to exist and, after `admitted`, to run. A second `give_back` is harmless."""

    queue: ModelQueue
    valid: bool = True
    running: bool = False
    waiter: asyncio.Future[None] | None = None

    async def admitted(self, priority: int) -> None:
        """Waits until the item may run. Raises QueueTimeout."""
        if not (self.running or self.queue.takes(self)):
            await self.queue.wait(self, priority)

    def give_back(self, *_: object) -> None:
        """Frees the place of an item after the end. Also the done callback of the item's task."""
        if self.valid:
            self.valid = False
            self.queue.leave(self)

    @property
    def waits(self) -> bool:
        """Whether the item is queued and not over."""
        return self.valid and not self.running and not (self.waiter and self.waiter.done())


class ModelQueue:
    """Running and queued items of a model."""

    def __init__(self, admission: Admission, model: str, limits: AdmissionLimits) -> None:
        self._admission = admission
        self._model = model
        self._limits = limits
        self._waiting: list[tuple[int, int, Permit]] = []
        self._by_arrival: deque[tuple[float, Permit]] = deque()
        """The waiting permits with the times of their arrival."""
        self._arrivals = 0
        self._ends = Ewma()
        self._last_end = 0.0
        self.items = 0
        self.running = 0

    @property
    def queued(self) -> int:
        """Items with a permit, waiting to run."""
        return self.items - self.running

    def check(self, items: int, freed: int) -> None:
        """Raises QueueFull if more items do not fit once `freed` have left, InvalidField if they never will."""
        limits = self._limits
        most = limits.max_running_items + limits.max_queued_items
        if items > most:
            raise InvalidField(
                f"has {items} prompts but model {self._model} takes at most {most} at once:"
                f" {limits.max_running_items} run (admission.max_running_items) and {limits.max_queued_items} wait"
                " (admission.max_queued_items); split the request",
                field="items",
                value=str(items),
                limit=f"at most {most}",
            )
        if self.items - freed + items > most:
            raise QueueFull.of(
                limits.max_queued_items,
                f"model {self._model} has {self.running} items running and {self.queued} queued, {items} asked;"
                f" {limits.max_running_items} may run (admission.max_running_items) and {limits.max_queued_items} wait"
                " (admission.max_queued_items)",
                retry_after_ms=self.retry_after_ms(self.items - freed + items - most),
            )

    def admit(self, items: int, leaving: Sequence[Permit]) -> list[Permit]:
        self.items += items
        permits = [Permit(self) for _ in range(items)]
        if leaving:
            running = [permit for permit in leaving if permit.running]
            for permit, former in zip(permits, running, strict=False):
                permit.running, former.running = True, False
        return permits

    def takes(self, permit: Permit) -> bool:
        """Has the permit's item run, unless it must wait."""
        if self._waiting or self.running >= self._limits.max_running_items:
            return False
        permit.running = True
        self.running += 1
        return True

    async def wait(self, permit: Permit, priority: int) -> None:
        heapq.heappush(self._waiting, (-priority, self._arrivals, permit))
        self._by_arrival.append((asyncio.get_running_loop().time(), permit))
        self._arrivals += 1
        self._grant()
        if permit.running:
            return
        permit.waiter = asyncio.get_running_loop().create_future()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._limits.queue_seconds):
                await permit.waiter
        if not permit.running:
            raise QueueTimeout(
                f"the item waited {self._limits.queue_seconds:g} s (admission.queue_seconds) for one of"
                f" {self._limits.max_running_items} places of model {self._model}; try again later",
                limit=f"{self._limits.queue_seconds:g}",
                retry_after_ms=self.retry_after_ms(self.queued),
            )

    def leave(self, permit: Permit) -> None:
        self.items -= 1
        self._admission.live_items -= 1
        if permit.running:
            self.running -= 1
            self._note_end()
        if self._waiting or self._by_arrival:
            self._grant()

    def retry_after_ms(self, ahead: int) -> int:
        """Expected time until `ahead` items have ended, at the current pace."""
        if self._ends.value is None:
            return UNKNOWN_RETRY_MS
        milliseconds = round(self._ends.value * max(ahead, 1) * 1000)
        return min(max(milliseconds, SHORTEST_RETRY_MS), LONGEST_RETRY_MS)

    def _grant(self) -> None:
        while self.running < self._limits.max_running_items and (permit := self._next()):
            permit.running = True
            self.running += 1
            if permit.waiter is not None:
                permit.waiter.set_result(None)
        if len(self._waiting) > 2 * self.queued:
            # Most entries are stale; at most `queued` of them wait.
            self._waiting = [entry for entry in self._waiting if entry[2].waits]
            heapq.heapify(self._waiting)
        if len(self._by_arrival) > 2 * self.queued:
            self._by_arrival = deque(entry for entry in self._by_arrival if entry[1].waits)

    def _next(self) -> Permit | None:
        """Returns the waiting permit with the next turn, or None."""
        while self._by_arrival and not self._by_arrival[0][1].waits:
            self._by_arrival.popleft()
        if not self._by_arrival:
            return None
        arrived, oldest = self._by_arrival[0]
        if asyncio.get_running_loop().time() - arrived >= self._limits.queue_seconds / 2:
            return oldest
        while not self._waiting[0][2].waits:
            heapq.heappop(self._waiting)
        return self._waiting[0][2]

    def _note_end(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._last_end:
            self._ends.add(now - self._last_end)
        self._last_end = now


class Admission:
    """The permits of a router."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self._queues: dict[str, ModelQueue] = {}
        self.live_items = 0
        self.request_bytes = RequestBytes(limits.max_request_bytes)

    @property
    def queued_items(self) -> int:
        return sum(queue.queued for queue in self._queues.values())

    def admit(self, model: str, items: int, leaving: Sequence[Permit] = ()) -> list[Permit]:
        """Takes a permit for each item of a request. Raises QueueFull, or InvalidField for more than ever fit.

        `leaving` are the permits of the replaced call: they do not count, and running items hand their places on.
        """
        if model not in self._queues:
            # Bounded by the models of the workers.
            self._queues[model] = ModelQueue(self, model, self.limits)
        queue = self._queues[model]
        if leaving:
            leaving = [permit for permit in leaving if permit.valid and permit.queue is queue]
        freed = len(leaving)
        if items > self.limits.max_items:
            raise InvalidField(
                f"has {items} prompts but the router takes at most {self.limits.max_items}"
                " (admission.max_items) at once; split the request",
                field="items",
                value=str(items),
                limit=f"at most {self.limits.max_items}",
            )
        if self.live_items - freed + items > self.limits.max_items:
            raise QueueFull.of(
                self.limits.max_items,
                f"{self.live_items} items live, {items} asked, {self.limits.max_items} allowed (admission.max_items)",
                retry_after_ms=queue.retry_after_ms(items),
            )
        queue.check(items, freed)
        self.live_items += items
        return queue.admit(items, leaving)
