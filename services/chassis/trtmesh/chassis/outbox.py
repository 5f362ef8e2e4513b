"""Commands that wait to be written to a stream."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

C = TypeVar("C")


class Outbox(Generic[C]):
    """Whatever is put while a write is in flight leaves with the next one, in order.

    Large commands say their size: those that leave together have at most `most_bytes`, unless one alone has more.
    """

    def __init__(self, most_bytes: int = 2**20) -> None:
        self._most_bytes = most_bytes
        self._waiting: list[C] = []
        self._sizes: list[int] = []
        self._taker: asyncio.Future[None] | None = None

    def put(self, command: C, size: int = 0) -> None:
        self._waiting.append(command)
        self._sizes.append(size)
        if self._taker is not None and not self._taker.done():
            self._taker.set_result(None)

    async def take(self, most: int = 256) -> list[C]:
        """The next commands, at least one and at most `most`. One taker only."""
        while not self._waiting:
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        count = self._count_within(most)
        taken = self._waiting[:count]
        del self._waiting[:count]
        del self._sizes[:count]
        return taken

    def _count_within(self, most: int) -> int:
        total = 0
        for count, size in enumerate(self._sizes[:most]):
            total += size
            if count and total > self._most_bytes:
                return count
        return min(most, len(self._sizes))
