"""Waiting for the first of several, and for all."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from leaks import gone, without_collector
from trtmesh.chassis.tasks import deadline, until_all_end, until_first_ends

Until = Callable[..., Awaitable[None]]


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


async def test_all_have_ended_after_the_last() -> None:
    ended: list[int] = []

    async def end(number: int, passes: int) -> None:
        for _ in range(passes):
            await asyncio.sleep(0)
        ended.append(number)

    await until_all_end(end(1, 5), end(2, 1))
    assert ended == [2, 1]


async def test_an_error_of_one_ends_all() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def fail() -> None:
        raise ValueError("one")

    with pytest.raises(ValueError, match="one"):
        await until_all_end(wait(), fail())
    assert ended.is_set()


@pytest.mark.parametrize("until", [until_first_ends, until_all_end])
async def test_errors_leave_nothing_for_the_garbage_collector(until: Until) -> None:
    class Broken(Exception):
        pass

    async def fail() -> None:
        raise Broken

    with without_collector():
        with suppress(Broken):
            await until(fail(), fail(), asyncio.sleep(3600))
        await gone(Broken)


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


async def test_deadline_passes() -> None:
    with pytest.raises(TimeoutError):
        async with deadline(0.05):
            await asyncio.get_running_loop().create_future()


async def test_deadline_blames_nobody_for_a_pause_of_this_process() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        async with deadline(0.5):
            reading = asyncio.create_task(asyncio.get_running_loop().sock_recv(ours, 1))
            await asyncio.sleep(0)
            time.sleep(0.6)  # noqa: ASYNC251 - the pause
            theirs.send(b"a")
            assert await reading == b"a"
