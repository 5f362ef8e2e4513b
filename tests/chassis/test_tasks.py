"""Waiting for the first of several."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from trtmesh.chassis.tasks import until_first_ends


async def test_first_error_is_raised_and_others_end() -> None:
    ended = asyncio.Event()

    async def fail() -> None:
        raise ValueError("first")

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    with pytest.raises(ValueError, match="first"):
        await until_first_ends(wait(), fail())
    assert ended.is_set()


async def test_cancellation_of_the_caller_is_kept() -> None:
    ending, may_end = asyncio.Event(), asyncio.Event()

    async def end_slowly() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ending.set()
            with suppress(asyncio.CancelledError):
                await may_end.wait()

    async def end() -> None:
        await asyncio.sleep(0)

    caller = asyncio.create_task(until_first_ends(end_slowly(), end()))
    await ending.wait()
    caller.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
