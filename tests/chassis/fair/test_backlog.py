"""Few large messages exist in parsed form, and the others wait in order."""

from __future__ import annotations

import asyncio

from trtmesh.chassis.fair.messages import COST, MOST_BYTES, Backlog

HALF = MOST_BYTES // COST // 2
PASSES = 20
"""More than a rest takes."""


async def passes() -> None:
    for _ in range(PASSES):
        await asyncio.sleep(0)


async def test_messages_wait_in_order_for_room() -> None:
    backlog = Backlog()
    await backlog.enter(HALF)
    await backlog.enter(HALF)
    order = list[str]()

    async def enter(name: str, size: int) -> None:
        await backlog.enter(size)
        order.append(name)

    tasks = [asyncio.create_task(enter(name, HALF)) for name in "abc"]
    # There is room for it, but it does not overtake.
    tasks.append(asyncio.create_task(enter("small", 1)))
    await passes()
    assert order == []
    backlog.leave(HALF)
    await passes()
    assert order == ["a"]
    backlog.leave(HALF)
    backlog.leave(HALF)
    await passes()
    assert order == ["a", "b", "c"]
    backlog.leave(HALF)
    await passes()
    assert order == ["a", "b", "c", "small"]
    await asyncio.gather(*tasks)


async def test_one_message_of_any_size_enters_alone() -> None:
    backlog = Backlog()
    await backlog.enter(4 * MOST_BYTES)
    waiting = asyncio.create_task(backlog.enter(1))
    await passes()
    assert not waiting.done()
    backlog.leave(4 * MOST_BYTES)
    await waiting


async def test_a_handler_counts_its_message_again_before_others_enter() -> None:
    backlog = Backlog()
    await backlog.enter(2 * HALF)
    waiting = asyncio.create_task(backlog.enter(HALF))
    await asyncio.sleep(0)
    backlog.leave(2 * HALF)
    backlog.add(2 * HALF)
    await passes()
    assert not waiting.done()
    backlog.leave(2 * HALF)
    await waiting


async def test_calls_that_end_while_they_wait_hold_up_none() -> None:
    backlog = Backlog()
    await backlog.enter(2 * HALF)
    gone = [asyncio.create_task(backlog.enter(HALF)) for _ in range(3)]
    await asyncio.sleep(0)
    backlog.leave(2 * HALF)
    for task in gone:
        task.cancel()
    await asyncio.wait(gone)
    await asyncio.wait_for(backlog.enter(2 * HALF), 5)


async def test_a_call_that_ends_as_it_enters_leaves() -> None:
    """For any number of passes between the room and the end of the call."""
    for count in range(PASSES):
        backlog = Backlog()
        await backlog.enter(2 * HALF)
        entering = asyncio.create_task(backlog.enter(2 * HALF))
        await asyncio.sleep(0)
        backlog.leave(2 * HALF)
        for _ in range(count):
            await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait([entering])
        if not entering.cancelled():
            backlog.leave(2 * HALF)
        await asyncio.wait_for(backlog.enter(2 * HALF), 5)
