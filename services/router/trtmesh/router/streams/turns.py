"""Limits the writes per pass of the event loop."""

from __future__ import annotations

import asyncio
from collections import deque

PER_TURN = 128
"""Writes per pass, few enough to leave time for other work; bench/README.md has the measurements."""


class Turns:
    """Wakes waiters in order, a few in each pass of the event loop.

    A step readies a message for every client at once. If a single pass wrote all messages, a new request would advance
    by a stage per step, and a thousand streams would delay the request by seconds.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._planned = False

    def ask(self, waiter: asyncio.Future[None]) -> None:
        """Queues `waiter`, whose result is set in turn."""
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
