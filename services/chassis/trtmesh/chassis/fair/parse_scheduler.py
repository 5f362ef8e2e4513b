"""Divides the time of the event loop between connections with unparsed input.

One read may hold 256 KiB of the cheapest frames that a peer finds, and parsing them takes a second. Each connection
parses for a short turn, all together for a limited time in a slice, and whoever has input left waits for the next slice
without reading more. Between two slices, during a rest, runs everything else: streams, timers, other peers. Addresses
take turns before connections do: one with a thousand connections has no more of them than one with a single one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator, Hashable
from time import perf_counter
from typing import Generic, Protocol, TypeVar

from trtmesh.chassis.fair.loop_yield import after_rest
from trtmesh.chassis.fair.rotation import Rotation

T = TypeVar("T")

TURN_SECONDS = 0.001
"""Time of a connection in a slice. A turn ends after the frame that reaches it; a frame's size bounds the excess."""

SLICE_SECONDS = 0.002
"""Time of all connections together between two rests; an excess is taken from the next slices."""


class Work(Protocol):
    """What a peer sent and what must be parsed, in turns."""

    def go_on(self, until: float) -> bool:
        """Works until the time `until` of `perf_counter`, or to the end. Returns whether something may be left."""

    def completed(self) -> None:
        """Called when nothing is left, unless `ParseScheduler.take` has done the work at once."""


class ParseScheduler:
    """The turns of all connections of one server, or of all links of a router."""

    def __init__(self) -> None:
        self._fresh = Rotation[Work]()
        """Work before its first turn. It alternates with work that took turns already: what is new and small does not
        wait for all that is old, and what is old gets on while new work arrives without end."""
        self._waiting = Rotation[Work]()
        self._fresh_is_next = True
        self._spent = 0.0
        self._planned = False

    def take(self, work: Work, origin: Hashable = "") -> bool:
        """Gives the work a turn now, if this slice has time left. Returns whether the work waits for another.

        `origin` has one share of the turns: the address, for clients.
        """
        if self._spent < SLICE_SECONDS and not self._fresh:
            waits = self._turn(work)
            if waits:
                self._waiting.add(origin, work)
        else:
            waits = True
            self._fresh.add(origin, work)
        # Short turns of several slices may add up: a rest after each would cost more than it saves.
        if waits or self._spent >= TURN_SECONDS:
            self._plan()
        return waits

    def charge(self, seconds: float) -> None:
        """Shortens the next slices by time that input took outside of its turn."""
        self._spent += seconds
        if self._spent >= TURN_SECONDS:
            self._plan()

    def _turn(self, work: Work) -> bool:
        began = perf_counter()
        try:
            return work.go_on(began + TURN_SECONDS)
        finally:
            self._spent += perf_counter() - began

    def _next(self) -> tuple[Hashable, Work] | None:
        """Returns the work whose turn it is, and its origin."""
        first, second = self._fresh, self._waiting
        if not self._fresh_is_next:
            first, second = second, first
        if not (queue := first or second):
            return None
        self._fresh_is_next = queue is self._waiting
        return queue.take()

    def _plan(self) -> None:
        """Plans the next slice, unless work that was taken during this one has done so."""
        if not self._planned:
            self._planned = True
            after_rest(self._slice)

    def _slice(self) -> None:
        self._planned = False
        self._spent = max(0.0, self._spent - SLICE_SECONDS)
        try:
            while self._spent < SLICE_SECONDS and (following := self._next()) is not None:
                origin, work = following
                if self._turn(work):
                    self._waiting.add(origin, work)
                else:
                    work.completed()
        finally:
            if self._fresh or self._waiting or self._spent >= TURN_SECONDS:
                self._plan()


class _Steps(Generic[T]):
    """A generator that yields between its steps."""

    def __init__(self, steps: Generator[None, None, T]) -> None:
        self._steps = steps
        self.result: T
        self.error: Exception | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self, until: float) -> bool:
        try:
            while True:
                next(self._steps)
                if perf_counter() >= until:
                    return True
        except StopIteration as end:
            self.result = end.value
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            self.error = error
        return False

    def completed(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


class ConnectionQueue:
    """Works of one connection, one after the other: they take the turns of one, however many they are."""

    def __init__(self, turns: ParseScheduler, origin: Hashable = "") -> None:
        self._turns, self._origin = turns, origin
        self._works: deque[Work] = deque()

    async def run(self, steps: Generator[None, None, T]) -> T:
        """Runs a generator that yields between its steps. Returns its result, or raises its error."""
        work = _Steps(steps)
        self.take(work)
        try:
            await work.done
        finally:
            steps.close()
        if work.error is not None:
            try:
                raise work.error
            finally:
                # A cycle would keep what its frames have.
                work.error = None
        return work.result

    def take(self, work: Work) -> None:
        """Has the work go on in turns until it is completed, at once if there is time."""
        self._works.append(work)
        if len(self._works) == 1:
            self._turns.take(self, self._origin)

    def go_on(self, until: float) -> bool:
        while self._works:
            if self._works[0].go_on(until):
                return True
            self._works.popleft().completed()
            if perf_counter() >= until:
                break
        return bool(self._works)

    def completed(self) -> None:
        """Each work was told when it was."""
