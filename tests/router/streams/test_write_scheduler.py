"""Waiters are woken in order, without blocking the event loop."""

from __future__ import annotations

import asyncio

from trtmesh.router.streams.client_stream import WRITES_PER_PASS, WriteScheduler


async def test_pass_of_the_loop_wakes_a_bounded_number_in_order() -> None:
    loop, writes = asyncio.get_running_loop(), WriteScheduler()
    waiters = [loop.create_future() for _ in range(WRITES_PER_PASS * 2 + 1)]
    for waiter in waiters:
        writes.ask(waiter)
    woken = []
    while not waiters[-1].done():
        await asyncio.sleep(0)
        woken.append([waiter.done() for waiter in waiters].count(True))
        assert [waiter.done() for waiter in waiters] == sorted(
            (waiter.done() for waiter in waiters), reverse=True
        )
    assert woken == [WRITES_PER_PASS, WRITES_PER_PASS * 2, len(waiters)]


async def test_cancelled_waiter_is_skipped() -> None:
    loop, writes = asyncio.get_running_loop(), WriteScheduler()
    gone, there = loop.create_future(), loop.create_future()
    writes.ask(gone)
    writes.ask(there)
    gone.cancel()
    await there
    writes.ask(later := loop.create_future())
    await later
