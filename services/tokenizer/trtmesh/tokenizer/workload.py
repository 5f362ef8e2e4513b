"""Counts the work in flight in the process, for draining."""

from __future__ import annotations

import asyncio

from trtmesh.chassis.errors import Draining


class Workload:
    """Counts the encodes and decode states of all streams. Every `begin` is matched by an `end`."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """Admits one encode or sequence. Raises Draining."""
        if self._draining:
            raise Draining("the tokenizer is draining and admits no new encodes or sequences")
        self._in_flight += 1
        self._idle.clear()

    def end(self, count: int = 1) -> None:
        self._in_flight -= count
        if not self._in_flight:
            self._idle.set()

    async def drain(self) -> None:
        """Admits nothing more and returns when nothing is in flight."""
        self._draining = True
        await self._idle.wait()
