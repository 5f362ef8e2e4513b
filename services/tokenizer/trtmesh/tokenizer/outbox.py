"""Answers that wait to be written to a stream."""

from __future__ import annotations

import asyncio
from collections import deque

from trtmesh.v1 import tokenizer_pb2 as pb

_MESSAGE_TOKENS = 2**18
"""Tokens from which a message takes no further event: at most a megabyte; one event may be larger."""


class Outbox:
    """Whatever is put while a write is in flight leaves with the next one, in order. One taker.

    Events are made inside the message that will carry them, because putting a message into another copies it by
    serialising and parsing, which for the ids of a long text stops the event loop for many milliseconds.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._messages: deque[pb.TokenizerServiceConnectResponse] = deque()
        self._waiting = 0
        self._tokens_of_last = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._roomy = asyncio.Event()
        self._roomy.set()

    def add(self, tokens: int) -> pb.TokenizerEvent:
        """An empty event of about `tokens` ids or texts, to be filled before anything else is awaited."""
        if not self._messages or self._tokens_of_last >= _MESSAGE_TOKENS:
            self._messages.append(pb.TokenizerServiceConnectResponse())
            self._tokens_of_last = 0
        self._tokens_of_last += tokens
        self._waiting += 1
        if self._waiting >= self._most_waiting:
            self._roomy.clear()
        self._changed.set()
        return self._messages[-1].events.add()

    async def room(self) -> None:
        """Waits until fewer events wait than the limit."""
        await self._roomy.wait()

    def close(self) -> None:
        """Says that nothing more will be added."""
        self._closed = True
        self._changed.set()

    async def take(self) -> pb.TokenizerServiceConnectResponse | None:
        """The next message; None when the outbox is closed and empty."""
        while not self._messages and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._waiting -= len(message.events)
        if self._waiting < self._most_waiting:
            self._roomy.set()
        return message
