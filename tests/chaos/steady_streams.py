"""Requests that run all the time while something else goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

Ask = Callable[[], Awaitable[None]]
"""Sends a request and checks every token of the result."""


@asynccontextmanager
async def steady_streams(asks: Sequence[Ask]) -> AsyncIterator[None]:
    """Repeats each request during the block, at least once before, and from the block's end on once more."""
    over = False
    warm = [asyncio.Event() for _ in asks]

    async def repeat(ask: Ask, once: asyncio.Event) -> None:
        while not over:
            await ask()
            once.set()
        await ask()

    async with asyncio.TaskGroup() as group:
        for ask, once in zip(asks, warm, strict=True):
            group.create_task(repeat(ask, once))
        for once in warm:
            await once.wait()
        try:
            yield
        finally:
            over = True
