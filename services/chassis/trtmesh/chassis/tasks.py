"""Waits for several tasks without leaving any behind, for the next tick of what is periodic, and with a deadline that
blames no peer for a process that stood still."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

DEADLINE_TICKS = 10
"""Ticks of a deadline."""


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


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError after `seconds` in the block, counted in ticks."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        ticks = Ticks(seconds, lambda: timeout.reschedule(loop.time()))
        try:
            yield
        finally:
            ticks.cancel()


class Ticks:
    """Calls `over` after `seconds`, counted in ticks: a pause of this process is one tick, and what arrived during the
    pause is read before the next."""

    def __init__(self, seconds: float, over: Callable[[], None]) -> None:
        self._seconds, self._over = seconds / DEADLINE_TICKS, over
        self._left = DEADLINE_TICKS
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._seconds, self._tick)

    def cancel(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._loop.call_later(self._seconds, self._tick)
        else:
            self._over()


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
