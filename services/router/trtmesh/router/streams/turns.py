"""Whose turn it is on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 128
"""Writes of one pass of the event loop: nothing else waits long for so many; bench/README.md has what was tried."""


class Turns:
    """Wakes waiters in the order they asked, a few in each pass of the event loop.

    A step makes a message ready for every client at once. If all were written in one pass, a new request would get one
    chance a step to come one stage further, and a thousand streams would keep it out for seconds.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._planned = False

    def ask(self, waiter: asyncio.Future[None]) -> None:
        """Sets the result of `waiter` when its turn comes."""
        self._waiting.append(waiter)
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        waiting = self._waiting
        for _ in range(min(PER_TURN, len(waiting))):
            waiter = waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
        self._planned = bool(waiting)
        if waiting:
            asyncio.get_running_loop().call_soon(self._grant)
