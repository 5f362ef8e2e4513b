"""Commands that wait to be written to a stream."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

C = TypeVar("C")


class Outbox(Generic[C]):
    """Whatever is put while a write is in flight leaves with the next one, in order."""

    def __init__(self) -> None:
        self._waiting: list[C] = []
        self._taker: asyncio.Future[None] | None = None

    def put(self, command: C) -> None:
        self._waiting.append(command)
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def take(self, most: int = 256) -> list[C]:
        """The next commands, at least one and at most `most`. One taker only."""
        while not self._waiting:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        taken = self._waiting[:most]
        del self._waiting[:most]
        return taken
