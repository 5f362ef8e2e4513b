"""Requests that run all the time while something else goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

Ask = Callable[[], Awaitable[None]]
"""Sends a request and checks every token of the result."""

REST_SECONDS = 0.1


@asynccontextmanager
async def steady_streams(asks: Sequence[Ask]) -> AsyncIterator[None]:
    """Repeats each request during the block, after short rests, at least once before, and from the block's end on once
    more."""
    over = asyncio.Event()
    warm = [asyncio.Event() for _ in asks]

    async def repeat(ask: Ask, once: asyncio.Event) -> None:
        await ask()
        once.set()
        while not over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), REST_SECONDS)
            await ask()

    async with asyncio.TaskGroup() as group:
        for ask, once in zip(asks, warm, strict=True):
            group.create_task(repeat(ask, once))
        for once in warm:
            await once.wait()
        try:
            yield
        finally:
            over.set()
