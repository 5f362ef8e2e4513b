"""Items leave in order, merged over passes of the event loop, within the limits of a message."""

from __future__ import annotations

import asyncio
from operator import attrgetter
from typing import TypeAlias

import pytest
from trtmesh.chassis import forwarding as module
from trtmesh.chassis.forwarding import ENOUGH_ITEMS, MAX_BYTES, MAX_ITEMS, Outbox
from trtmesh.v1 import tokenizer_pb2 as pb

Events: TypeAlias = "Outbox[pb.TokenizerServiceConnectResponse, pb.TokenizerEvent]"


MANY = 20
"""Passes of the event loop; no message waits for so many."""


def new_outbox(max_waiting: int | None = None) -> Events:
    return Outbox(pb.TokenizerServiceConnectResponse, attrgetter("events"), max_waiting)


def add(outbox: Events, handle: int, size: int = 0) -> None:
    outbox.add(size).encoded.handle = handle


class Reader:
    """The messages of an outbox, as they are written."""

    def __init__(self, outbox: Events) -> None:
        self._written = asyncio.Queue[pb.TokenizerServiceConnectResponse]()
        self.forwarding = asyncio.create_task(outbox.forward(self))

    def write_now(self, message: pb.TokenizerServiceConnectResponse) -> bool:
        self._written.put_nowait(message)
        return True

    async def write(self, message: pb.TokenizerServiceConnectResponse) -> None:
        self.write_now(message)

    async def handles(self) -> list[int]:
        """Those of the next message."""
        async with asyncio.timeout(60):
            return [event.encoded.handle for event in (await self._written.get()).events]

    @property
    def has_more(self) -> bool:
        return not self._written.empty()


async def test_waiting_items_leave_together_in_order() -> None:
    outbox = new_outbox()
    for handle in range(5):
        add(outbox, handle)
    assert await Reader(outbox).handles() == [0, 1, 2, 3, 4]


async def test_nothing_leaves_before_the_first_item() -> None:
    outbox = new_outbox()
    reader = Reader(outbox)
    await asyncio.sleep(0)
    assert not reader.has_more
    add(outbox, 7)
    assert await reader.handles() == [7]


async def test_message_after_a_silence_leaves_at_once() -> None:
    outbox = new_outbox()
    reader = Reader(outbox)
    await asyncio.sleep(0)
    for handle in range(MANY):
        add(outbox, handle)
        await asyncio.sleep(0)
    assert await reader.handles() == [0]


Burst: TypeAlias = tuple[Events, Reader]


@pytest.fixture
async def burst(monkeypatch: pytest.MonkeyPatch) -> Burst:
    """An outbox whose last message has just left."""
    monkeypatch.setattr(module, "BURST_SECONDS", 60.0)
    outbox = new_outbox()
    add(outbox, 0)
    reader = Reader(outbox)
    await reader.handles()
    return outbox, reader


async def test_message_of_a_burst_holds_what_the_next_few_passes_add(burst: Burst) -> None:
    outbox, reader = burst
    for handle in range(MANY):
        add(outbox, handle)
        await asyncio.sleep(0)
    first = await reader.handles()
    assert 3 < len(first) < MANY
    rest = list[int]()
    while len(first) + len(rest) < MANY:
        rest += await reader.handles()
    assert first + rest == list(range(MANY))


async def test_full_enough_message_does_not_wait(burst: Burst) -> None:
    outbox, reader = burst
    for handle in range(ENOUGH_ITEMS):
        add(outbox, handle)
    await asyncio.sleep(0)
    add(outbox, MANY)
    assert await reader.handles() == list(range(ENOUGH_ITEMS))


async def test_pass_that_adds_no_item_sends_a_message(burst: Burst) -> None:
    outbox, reader = burst
    add(outbox, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    add(outbox, 2)
    assert await reader.handles() == [1]


async def test_message_is_bounded_by_bytes() -> None:
    outbox = new_outbox()
    for handle, size in enumerate([MAX_BYTES // 2, MAX_BYTES // 2, 1, 2 * MAX_BYTES, 1]):
        add(outbox, handle, size)
    reader = Reader(outbox)
    assert [await reader.handles() for _ in range(4)] == [[0, 1], [2], [3], [4]]


async def test_message_is_bounded_by_items() -> None:
    outbox = new_outbox()
    for handle in range(MAX_ITEMS + 1):
        add(outbox, handle)
    reader = Reader(outbox)
    assert len(await reader.handles()) == MAX_ITEMS
    assert await reader.handles() == [MAX_ITEMS]


async def test_message_that_leaves_makes_room() -> None:
    outbox = new_outbox(max_waiting=2)
    await outbox.wait_for_room()
    add(outbox, 0)
    add(outbox, 1)
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.take()
    await waiting


async def test_closed_outbox_writes_the_rest_and_ends() -> None:
    outbox = new_outbox()
    add(outbox, 0)
    outbox.close()
    reader = Reader(outbox)
    assert await reader.handles() == [0]
    await reader.forwarding
