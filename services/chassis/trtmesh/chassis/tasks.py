"""Waiting for several things at once, leaving none behind."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def until_first_ends(*waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
    """Waits for the first to end, raises its error, cancels the others and waits for their end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        # Awaiting them one by one and suppressing their cancellation would suppress one that is meant for the caller.
        await asyncio.gather(*tasks, return_exceptions=True)
