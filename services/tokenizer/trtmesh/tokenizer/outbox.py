"""Answers that wait to be written to a stream."""

from __future__ import annotations

import asyncio

from trtmesh.v1 import tokenizer_pb2 as pb

_MESSAGE_BYTES = 2**20
"""Size from which a message takes no further event; one event may be larger."""


class Outbox:
    """Whatever is put while a write is in flight leaves with the next one, in order. One taker, one putter's wait."""

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._waiting: list[pb.TokenizerEvent] = []
        self._closed = False
        self._changed = asyncio.Event()
        self._roomy = asyncio.Event()
        self._roomy.set()

    def put(self, event: pb.TokenizerEvent) -> None:
        self._waiting.append(event)
        self._changed.set()
        if len(self._waiting) >= self._most_waiting:
            self._roomy.clear()

    async def room(self) -> None:
        """Waits until fewer events wait than the limit."""
        await self._roomy.wait()

    def close(self) -> None:
        """Says that nothing more will be put."""
        self._closed = True
        self._changed.set()

    async def take(self) -> list[pb.TokenizerEvent]:
        """The next events, as many as make a message of a good size; none when the outbox is closed and empty."""
        while not self._waiting and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        taken = self._next_message()
        del self._waiting[: len(taken)]
        if len(self._waiting) < self._most_waiting:
            self._roomy.set()
        return taken

    def _next_message(self) -> list[pb.TokenizerEvent]:
        if len(self._waiting) == 1:
            return self._waiting[:]
        size_bytes = 0
        for position, event in enumerate(self._waiting, start=1):
            size_bytes += event.ByteSize()
            if size_bytes >= _MESSAGE_BYTES:
                return self._waiting[:position]
        return self._waiting[:]
