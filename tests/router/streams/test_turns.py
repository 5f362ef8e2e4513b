"""Waiters are woken in order, without blocking the event loop."""

from __future__ import annotations

import asyncio

from trtmesh.router.streams.turns import PER_TURN, Turns


async def test_pass_of_the_loop_wakes_a_bounded_number_in_order() -> None:
    loop, turns = asyncio.get_running_loop(), Turns()
    waiters = [loop.create_future() for _ in range(PER_TURN * 2 + 1)]
    for waiter in waiters:
        turns.ask(waiter)
    woken = []
    while not waiters[-1].done():
        await asyncio.sleep(0)
        woken.append([waiter.done() for waiter in waiters].count(True))
        assert [waiter.done() for waiter in waiters] == sorted(
            (waiter.done() for waiter in waiters), reverse=True
        )
    assert woken == [PER_TURN, PER_TURN * 2, len(waiters)]


async def test_cancelled_waiter_is_skipped() -> None:
    loop, turns = asyncio.get_running_loop(), Turns()
    gone, there = loop.create_future(), loop.create_future()
    turns.ask(gone)
    turns.ask(there)
    gone.cancel()
    await there
    turns.ask(later := loop.create_future())
    await later
