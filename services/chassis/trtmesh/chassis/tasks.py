"""Waits for several tasks without leaving any behind, and for the next tick of what is periodic."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def until_first_ends(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Waits until the first ends, cancels the others, waits for their end and raises the first's error."""
    await _until(asyncio.FIRST_COMPLETED, waits)


async def until_all_end(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Waits until all end. After an error cancels the others, waits for their end and raises it."""
    await _until(asyncio.FIRST_EXCEPTION, waits)


async def next_tick(seconds: float) -> None:
    """Sleeps until a multiple of `seconds` on the clock of the event loop: what is periodic in a process wakes it
    together, and each wake of an idle process costs more than most of what is then done."""
    left = seconds - asyncio.get_running_loop().time() % seconds
    # Timers may end a little early.
    await asyncio.sleep(left if left > seconds / 2 else left + seconds)


async def _until(end: str, waits: Iterable[Coroutine[Any, Any, Any] | asyncio.Future[Any]]) -> None:
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(wait) for wait in waits]
    done: set[asyncio.Future[Any]] = set()
    try:
        done, _ = await asyncio.wait(tasks, return_when=end)
        while done:
            done.pop().result()
    finally:
        # A raised error refers to this frame. If the frame referred to the task, there would be a cycle.
        done.clear()
        await _end(tasks)


async def _end(tasks: list[asyncio.Future[Any]]) -> None:
    """Cancels tasks, waits for their end and empties the list."""
    for task in tasks:
        task.cancel()
    try:
        # `suppress(CancelledError)` around each await would also swallow a cancellation of the caller.
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        tasks.clear()
