"""Answers leave in order, together while a write is in flight, in messages of a good size."""

from __future__ import annotations

import asyncio

from trtmesh.tokenizer.outbox import Outbox
from trtmesh.v1 import tokenizer_pb2 as pb


def answer(handle: int, size: int = 1) -> pb.TokenizerEvent:
    encoded = pb.Encoded(handle=handle, token_ids=[1] * size)
    return pb.TokenizerEvent(encoded=encoded)


def handles(events: list[pb.TokenizerEvent]) -> list[int]:
    return [event.encoded.handle for event in events]


async def test_what_waits_leaves_together_and_in_order() -> None:
    outbox = Outbox(100)
    for handle in range(5):
        outbox.put(answer(handle))
    assert handles(await outbox.take()) == [0, 1, 2, 3, 4]


async def test_a_taker_waits_for_the_first() -> None:
    outbox = Outbox(100)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put(answer(7))
    assert handles(await taking) == [7]


async def test_large_answers_do_not_pile_up_in_one_message() -> None:
    outbox = Outbox(100)
    for handle in range(5):
        outbox.put(answer(handle, 600_000))
    assert handles(await outbox.take()) == [0, 1]
    assert handles(await outbox.take()) == [2, 3]
    assert handles(await outbox.take()) == [4]


async def test_room_is_made_by_taking() -> None:
    outbox = Outbox(2)
    await outbox.room()
    outbox.put(answer(0))
    outbox.put(answer(1))
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await outbox.take()
    await waiting


async def test_a_closed_outbox_gives_what_is_left_and_then_nothing() -> None:
    outbox = Outbox(2)
    outbox.put(answer(0))
    outbox.close()
    assert handles(await outbox.take()) == [0]
    assert await outbox.take() == []
