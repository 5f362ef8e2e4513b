"""Answers leave in order, together while a write is in flight, in messages of a good size."""

from __future__ import annotations

import asyncio

from trtmesh.tokenizer.outbox import Outbox
from trtmesh.v1 import tokenizer_pb2 as pb


def put(outbox: Outbox, handle: int, tokens: int = 1) -> None:
    outbox.add(tokens).encoded.handle = handle


def handles(message: pb.TokenizerServiceConnectResponse | None) -> list[int]:
    assert message is not None
    return [event.encoded.handle for event in message.events]


async def test_what_waits_leaves_together_and_in_order() -> None:
    outbox = Outbox(100)
    for handle in range(5):
        put(outbox, handle)
    assert handles(await outbox.take()) == [0, 1, 2, 3, 4]


async def test_a_taker_waits_for_the_first() -> None:
    outbox = Outbox(100)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    put(outbox, 7)
    assert handles(await taking) == [7]


async def test_large_answers_do_not_pile_up_in_one_message() -> None:
    outbox = Outbox(100)
    for handle in range(5):
        put(outbox, handle, 200_000)
    assert handles(await outbox.take()) == [0, 1]
    assert handles(await outbox.take()) == [2, 3]
    assert handles(await outbox.take()) == [4]


async def test_room_is_made_by_taking() -> None:
    outbox = Outbox(2)
    await outbox.room()
    put(outbox, 0)
    put(outbox, 1)
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await outbox.take()
    await waiting


async def test_a_closed_outbox_gives_what_is_left_and_then_nothing() -> None:
    outbox = Outbox(2)
    put(outbox, 0)
    outbox.close()
    assert handles(await outbox.take()) == [0]
    assert await outbox.take() is None
