"""Turns to connect: a router that starts before hundreds of replicas must not greet all of them at once, or on a busy
machine every greeting outlasts its deadline, and all begin again together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trtmesh.chassis.tasks import Ticks

MOST_TURNS = 32
"""Most turns at a time, each from the look-up of an address to the answer to the greeting."""

MOST_DOUBTFUL = 24
"""Most turns at a time for replicas that let their last turn pass. Each may take its whole deadline again, and a
replica that answered must not wait behind hundreds of them."""


class Turn:
    def __init__(self, turns: ConnectTurns, *, is_doubtful: bool) -> None:
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_doubtful = is_doubtful
        self._turns = turns
        self.ended = False

    def end(self) -> None:
        """Lets the next replica begin. May be called again."""
        if not self.ended:
            self.ended = True
            self._turns.end(self)


class ConnectTurns:
    """The turns of all replicas of a router, first come, first served; those that let their last turn pass come after
    the others."""

    def __init__(self) -> None:
        self._waiting: deque[Turn] = deque()
        self._doubtful: deque[Turn] = deque()
        self._begun = 0
        self._doubtful_begun = 0

    @asynccontextmanager
    async def turn(self, seconds: float, *, is_doubtful: bool) -> AsyncIterator[Turn]:
        """Waits for a turn, which ends after `seconds` or with the block: one that is slow to answer, or never does,
        may go on, and keeps nobody out."""
        turn = Turn(self, is_doubtful=is_doubtful)
        (self._doubtful if is_doubtful else self._waiting).append(turn)
        self._admit()
        try:
            await turn.begun
            ticks = Ticks(seconds, turn.end)
            try:
                yield turn
            finally:
                ticks.cancel()
        finally:
            turn.end()

    def end(self, turn: Turn) -> None:
        """Gives back a turn, even one that did not begin."""
        if turn.begun.done() and not turn.begun.cancelled():
            self._begun -= 1
            self._doubtful_begun -= turn.is_doubtful
            self._admit()

    def _admit(self) -> None:
        while self._begun < MOST_TURNS:
            if self._waiting:
                turn = self._waiting.popleft()
            elif self._doubtful and self._doubtful_begun < MOST_DOUBTFUL:
                turn = self._doubtful.popleft()
            else:
                return
            # Cancelled if the replica was removed while it waited.
            if not turn.begun.cancelled():
                self._begun += 1
                self._doubtful_begun += turn.is_doubtful
                turn.begun.set_result(None)
