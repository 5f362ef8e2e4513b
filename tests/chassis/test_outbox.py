"""Items leave in order, merged over passes of the event loop, within the limits of a message."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import TypeAlias

import pytest
from trtmesh.chassis import outbox as module
from trtmesh.chassis.outbox import ENOUGH_ITEMS, MAX_BYTES, MAX_ITEMS, Outbox
from trtmesh.v1 import tokenizer_pb2 as pb

Events: TypeAlias = "Outbox[pb.TokenizerServiceConnectResponse, pb.TokenizerEvent]"


MANY = 20
"""Passes of the event loop; no message waits for so many."""


def new_outbox(max_waiting: int | None = None) -> Events:
    return Outbox(pb.TokenizerServiceConnectResponse, attrgetter("events"), max_waiting)


def add(outbox: Events, handle: int, size: int = 0) -> None:
    outbox.add(size).encoded.handle = handle


async def next_handles(outbox: Events) -> list[int]:
    message = await outbox.next_message()
    assert message is not None
    return [event.encoded.handle for event in message.events]


async def test_waiting_items_leave_together_in_order() -> None:
    outbox = new_outbox()
    for handle in range(5):
        add(outbox, handle)
    assert await next_handles(outbox) == [0, 1, 2, 3, 4]


async def test_consumer_waits_for_the_first_item() -> None:
    outbox = new_outbox()
    consuming = asyncio.create_task(next_handles(outbox))
    await asyncio.sleep(0)
    assert not consuming.done()
    add(outbox, 7)
    assert await consuming == [7]


async def test_message_after_a_silence_leaves_at_once() -> None:
    outbox = new_outbox()
    consuming = asyncio.create_task(next_handles(outbox))
    await asyncio.sleep(0)
    for handle in range(MANY):
        add(outbox, handle)
        await asyncio.sleep(0)
    assert await consuming == [0]


@pytest.fixture
async def burst(monkeypatch: pytest.MonkeyPatch) -> Events:
    """An outbox whose last message has just left."""
    monkeypatch.setattr(module, "BURST_SECONDS", 60.0)
    outbox = new_outbox()
    add(outbox, 0)
    await outbox.next_message()
    return outbox


async def test_message_of_a_burst_holds_what_the_next_few_passes_add(burst: Events) -> None:
    consuming = asyncio.create_task(next_handles(burst))
    for handle in range(MANY):
        add(burst, handle)
        await asyncio.sleep(0)
    first = await consuming
    assert 3 < len(first) < MANY
    assert first + await next_handles(burst) == list(range(MANY))


async def test_full_enough_message_does_not_wait(burst: Events) -> None:
    for handle in range(ENOUGH_ITEMS - 1):
        add(burst, handle)
    consuming = asyncio.create_task(next_handles(burst))
    for handle in range(ENOUGH_ITEMS - 1, MANY):
        await asyncio.sleep(0)
        add(burst, handle)
    assert await consuming == list(range(ENOUGH_ITEMS))


async def test_pass_that_adds_no_item_sends_a_message(burst: Events) -> None:
    add(burst, 1)
    consuming = asyncio.create_task(next_handles(burst))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    add(burst, 2)
    assert await consuming == [1]


async def test_message_is_bounded_by_bytes() -> None:
    outbox = new_outbox()
    for handle, size in enumerate([MAX_BYTES // 2, MAX_BYTES // 2, 1, 2 * MAX_BYTES, 1]):
        add(outbox, handle, size)
    assert [await next_handles(outbox) for _ in range(4)] == [[0, 1], [2], [3], [4]]


async def test_message_is_bounded_by_items() -> None:
    outbox = new_outbox()
    for handle in range(MAX_ITEMS + 1):
        add(outbox, handle)
    assert len(await next_handles(outbox)) == MAX_ITEMS
    assert await next_handles(outbox) == [MAX_ITEMS]


async def test_next_message_makes_room() -> None:
    outbox = new_outbox(max_waiting=2)
    await outbox.wait_for_room()
    add(outbox, 0)
    add(outbox, 1)
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await outbox.next_message()
    await waiting


async def test_closed_outbox_returns_the_rest_and_then_none() -> None:
    outbox = new_outbox()
    add(outbox, 0)
    outbox.close()
    assert await next_handles(outbox) == [0]
    assert await outbox.next_message() is None
