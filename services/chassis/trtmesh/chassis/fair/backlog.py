"""Limits the large messages in parsed form that their handlers have not read. The others wait serialized, in a fraction
of the memory."""

from __future__ import annotations

import asyncio
from collections import deque

from trtmesh.chassis.fair.loop_yield import after_rest

COST = 4
"""Memory of a parsed message in multiples of its bytes: that of a list of ids, which is the most common large one."""

MOST_BYTES = 2**24
"""Most memory of parsed messages, unless it is only one. A handler reads one while the next is parsed: more need not
exist."""


class Backlog:
    """The large messages of one server that are being parsed, or parsed and not yet read; the others enter in order."""

    def __init__(self) -> None:
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._planned = False

    async def enter(self, size: int) -> None:
        """Waits until there is room for the parsed form of a message of `size` bytes, which counts from then on."""
        if not self._waiting and self._has_room(size):
            self.add(size)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._plan()
            else:
                self.leave(size)
            raise

    def add(self, size: int) -> None:
        """Counts a message without a wait: its handler goes on to read it."""
        self._held += COST * size

    def leave(self, size: int) -> None:
        """Counts a message no more: it is read, or handed to its handler. That has until after a rest to count it
        again."""
        self._held -= COST * size
        self._plan()

    def _has_room(self, size: int) -> bool:
        return not self._held or self._held + COST * size <= MOST_BYTES

    def _plan(self) -> None:
        if self._waiting and not self._planned:
            self._planned = True
            after_rest(self._admit)

    def _admit(self) -> None:
        self._planned = False
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.done():
                if not self._has_room(size):
                    return
                self.add(size)
                turn.set_result(None)
            self._waiting.popleft()
