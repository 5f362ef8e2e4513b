"""Starts and cancels handlers, a few in each pass of the event loop, in turn between connections.

A handler runs up to its first wait when it starts, and its clean-up when it is cancelled. If a burst of calls did so in
one pass, running streams would wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import perf_counter
from typing import Protocol

PASS_SECONDS = 0.002
"""Time for starts and cancellations in a pass. They run as tasks, so their number follows from their mean time."""

MAX_IN_PASS = 32
"""Limit for a mean that suddenly no longer holds."""

FIRST_GUESS_SECONDS = 0.0005
"""Mean time before the first measurement."""

WEIGHT = 0.2
"""Weight of a pass in the mean."""


class PacedCall(Protocol):
    """A call with a handler."""

    def proceed(self) -> None:
        """Starts or cancels the handler, as a task does: in the next pass."""


class Lane:
    """The calls of one connection that wait for their turn, in order."""

    def __init__(self, pacing: Pacing) -> None:
        self._pacing = pacing
        self.waiting: dict[PacedCall, None] = {}
        self.queued = False
        """Whether the lane has a place among the lanes, if only to be found empty."""

    def add(self, call: PacedCall) -> None:
        """Has the call proceed soon, once."""
        self._pacing.add(self, call)

    def remove(self, call: PacedCall) -> None:
        """Forgets a call that has nothing more to do."""
        self.waiting.pop(call, None)


class Pacing:
    """The order of all handlers of one server."""

    def __init__(self) -> None:
        self._lanes: deque[Lane] = deque()
        self._mean = FIRST_GUESS_SECONDS
        self._proceeding = 0
        """Calls that proceed in the next pass."""
        self._measured = 0
        """How many of them run between `_begin` and `_pass`, and nothing else."""
        self._began = 0.0
        self._planned = False

    def add(self, lane: Lane, call: PacedCall) -> None:
        """Has a call proceed at once if this pass has room and no other waits, else in turn."""
        if not self._lanes and self._proceeding < self._room:
            self._proceeding += 1
            call.proceed()
        else:
            lane.waiting[call] = None
            if not lane.queued:
                lane.queued = True
                self._lanes.append(lane)
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._pass)

    @property
    def _room(self) -> int:
        return max(1, min(MAX_IN_PASS, int(PASS_SECONDS / self._mean)))

    def _begin(self) -> None:
        self._began = perf_counter()

    def _pass(self) -> None:
        if self._measured:
            mean = (perf_counter() - self._began) / self._measured
            self._mean += WEIGHT * (mean - self._mean)
        self._measured = self._proceeding = 0
        self._planned = bool(self._lanes)
        if not self._lanes:
            return
        loop, room = asyncio.get_running_loop(), self._room
        # These callbacks run in a row in the next pass: begin, the tasks, and this method.
        loop.call_soon(self._begin)
        while self._lanes and self._proceeding < room:
            lane = self._lanes.popleft()
            if call := next(iter(lane.waiting), None):
                del lane.waiting[call]
                self._proceeding += 1
                call.proceed()
            if lane.waiting:
                self._lanes.append(lane)
            else:
                lane.queued = False
        self._measured = self._proceeding
        loop.call_soon(self._pass)
