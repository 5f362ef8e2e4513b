"""Lets handlers and items proceed, a few between two rests, in turn between addresses, and then between queues.

A handler runs up to its first wait when it starts, and its clean-up when it is cancelled; an item is placed in one go.
If a burst did so in one pass of the event loop, running streams would wait for all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from time import perf_counter
from typing import Protocol

from trtmesh.chassis.fair.loop_yield import MOST_SECONDS, after_rest
from trtmesh.chassis.fair.rotation import Rotation

SLICE_SECONDS = 0.003
"""Time between two rests. What proceeds runs as a task, so its number follows from its mean time."""

MAX_IN_SLICE = 32
"""Limit for a mean that suddenly no longer holds."""

FIRST_GUESS_SECONDS = 0.0005
"""Mean time before the first measurement."""

WEIGHT = 0.2
"""Weight of a slice in the mean."""


class PacedCall(Protocol):
    """A call with a handler, or a task that waits for its turn."""

    def proceed(self) -> None:
        """Starts, cancels or wakes it: it runs in the next pass."""


class _Waiter:
    """A task that waits for its turn."""

    __slots__ = ("turn",)

    def __init__(self) -> None:
        self.turn = asyncio.get_running_loop().create_future()

    def proceed(self) -> None:
        if not self.turn.done():
            self.turn.set_result(None)


class StartQueue:
    """The calls of one connection, or the items of one request, that wait for their turn, in order."""

    def __init__(self, scheduler: StartScheduler, origin: Hashable = "") -> None:
        self._scheduler = scheduler
        self.origin = origin
        """The address, or what else has one share of the turns."""
        self.waiting: dict[PacedCall, None] = {}
        self.queued = False
        """Whether the queue has a place among the queues, if only to be found empty."""

    def add(self, call: PacedCall) -> None:
        """Has the call proceed soon, once."""
        self._scheduler.add(self, call)

    def add_later(self, call: PacedCall) -> None:
        """Has the call proceed in its next turn, which it may ask for in this one."""
        self._scheduler.wait(self, call)

    def remove(self, call: PacedCall) -> None:
        """Forgets a call that has nothing more to do."""
        self.waiting.pop(call, None)

    async def turn(self) -> None:
        """Waits for a turn of the running task; does not suspend it if this slice has room and no other waits."""
        if not self._scheduler.enter():
            await self._wait()

    async def turn_before_rest(self) -> None:
        """Waits for a turn of the running task; does not suspend it if no other had one since a rest.

        For tasks that go on for milliseconds in this pass: several of them that did not wait would all run in it.
        """
        if not self._scheduler.enter_before_rest():
            await self._wait()

    async def turn_if_late(self) -> None:
        """Waits for another turn if those before it in this pass took a slice: by the mean of many cheap tasks, as many
        dear ones proceed. For a task in its turn."""
        while self._scheduler.is_late:
            await self._wait()

    async def _wait(self) -> None:
        waiter = _Waiter()
        self._scheduler.wait(self, waiter)
        try:
            await waiter.turn
        finally:
            self.remove(waiter)


class StartScheduler:
    """The order of all handlers of one server, or of all items of a router in one stage."""

    def __init__(self) -> None:
        self._queues = Rotation[StartQueue]()
        self._mean = FIRST_GUESS_SECONDS
        self._room = _room(self._mean)
        self._proceeding = 0
        """Calls that proceed in this slice."""
        self._slice_began = 0.0
        """Of a slice after which no rest is planned, since none waits for the next."""
        self._is_another_pass = True
        """Since the last call that entered."""
        self._began = 0.0
        self._planned = False

    def add(self, queue: StartQueue, call: PacedCall) -> None:
        """Has a call proceed at once if this slice has room and no other waits, else in turn."""
        if self.enter():
            call.proceed()
        else:
            self.wait(queue, call)

    def enter(self) -> bool:
        """Returns whether a call may proceed at once, and counts it then."""
        if self._queues:
            return False
        if self._is_another_pass and not self._planned:
            # Within a pass, slow calls must not have slice after slice.
            now = perf_counter()
            if now - self._slice_began > MOST_SECONDS:
                self._slice_began, self._proceeding = now, 0
        if self._proceeding >= self._room:
            return False
        self._proceeding += 1
        if self._is_another_pass:
            self._is_another_pass = False
            asyncio.get_running_loop().call_soon(self._pass)
        return True

    def _pass(self) -> None:
        self._is_another_pass = True
        self._begin()

    @property
    def is_late(self) -> bool:
        """Whether the calls of this pass have taken a slice."""
        return perf_counter() - self._began > SLICE_SECONDS

    def enter_before_rest(self) -> bool:
        """Returns whether a call may proceed at once, as the only one until a rest is over."""
        if self._planned:
            return False
        self._plan()
        return True

    def wait(self, queue: StartQueue, call: PacedCall) -> None:
        """Has a call proceed in turn, after a rest."""
        queue.waiting[call] = None
        if not queue.queued:
            queue.queued = True
            self._queues.add(queue.origin, queue)
        if not self._planned:
            self._plan()

    def _plan(self) -> None:
        self._planned = True
        after_rest(self._slice)

    def _slice(self) -> None:
        self._proceeding = 0
        self._planned = bool(self._queues)
        if not self._queues:
            return
        loop, room = asyncio.get_running_loop(), self._room
        # These callbacks run in a row in the next pass: begin, the tasks, and end.
        loop.call_soon(self._begin)
        try:
            while self._queues and self._proceeding < room:
                self._proceed()
        finally:
            # Whatever a call raises, the others have their turns.
            loop.call_soon(self._end, self._proceeding)

    def _proceed(self) -> None:
        """Gives the next queue a turn."""
        _, queue = self._queues.take()
        call = next(iter(queue.waiting), None)
        if call is not None:
            del queue.waiting[call]
        if queue.waiting:
            self._queues.add(queue.origin, queue)
        else:
            queue.queued = False
        if call is not None:
            self._proceeding += 1
            call.proceed()

    def _begin(self) -> None:
        self._began = perf_counter()

    def _end(self, proceeded: int) -> None:
        if proceeded:
            mean = (perf_counter() - self._began) / proceeded
            self._mean += WEIGHT * (mean - self._mean)
            self._room = _room(self._mean)
        after_rest(self._slice)


def _room(mean: float) -> int:
    """Returns the calls of a slice."""
    return max(1, min(MAX_IN_SLICE, int(SLICE_SECONDS / mean)))
