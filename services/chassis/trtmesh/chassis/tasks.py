"""Waits for several tasks without leaving any behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first_ends(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Waits until the first ends, cancels the others, waits for their end and raises the first's error."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        # `suppress(CancelledError)` around each await would also swallow a cancellation of the caller.
        await asyncio.gather(*tasks, return_exceptions=True)
