"""Received messages: what is decompressed counts as held, and is freed when nobody reads it."""

from __future__ import annotations

import asyncio
import tracemalloc
import zlib

import pytest
from trtmesh.chassis.fair.limits import Account, Budget
from trtmesh.chassis.fair.turns import ConnectionQueue, ParseScheduler
from trtmesh.chassis.grpc.messages import (
    INFLATED_BYTES,
    BadMessage,
    Message,
    MessageReader,
    ReceivedMessages,
    pack_prefix,
)

MOST = 2**27


async def _passes_until_held(messages: ReceivedMessages, size: int) -> None:
    while messages.held < size:  # noqa: ASYNC110 - each pass of the loop counts
        await asyncio.sleep(0)


async def next_of(messages: ReceivedMessages) -> Message | None:
    """The next message, or None after the last."""
    return None if await messages.arrived() is None else messages.take()


async def test_what_is_decompressed_counts_and_is_freed_by_drop() -> None:
    account = Budget(2 * MOST).account(lambda: None)
    messages = ReceivedMessages(
        MessageReader("gzip", MOST),
        2**20,
        lambda _: None,
        ConnectionQueue(ParseScheduler()),
        account,
    )
    body = zlib.compress(bytes(MOST - 1), 1, 31)
    messages.feed(pack_prefix(1, len(body)) + body, 0)
    reading = asyncio.create_task(next_of(messages))
    await _passes_until_held(messages, len(body) + 8 * INFLATED_BYTES)
    assert account.held == messages.held
    messages.drop()
    assert (messages.held, account.held) == (0, 0)
    with pytest.raises(BadMessage):
        await reading
    assert account.held == 0


async def test_the_budget_ends_the_call_that_decompresses() -> None:
    budget = Budget(MOST // 4)
    found: list[ReceivedMessages] = []
    account = budget.account(lambda: max(found, key=lambda messages: messages.held).drop())
    queue = ConnectionQueue(ParseScheduler())
    found += [
        ReceivedMessages(MessageReader("gzip", MOST), 2**20, lambda _: None, queue, account)
        for _ in range(2)
    ]
    small, bomb = found
    small.feed(pack_prefix(0, 2000) + bytes(1000), 0)
    body = zlib.compress(bytes(MOST - 1), 1, 31)
    bomb.feed(pack_prefix(1, len(body)) + body, 0)
    with pytest.raises(BadMessage):
        await next_of(bomb)
    assert (small.held, account.held, budget.held) == (1005, 1005, 1005)


async def test_a_cancelled_reader_frees_what_it_decompressed_and_may_come_again() -> None:
    account = Budget(2 * MOST).account(lambda: None)
    messages = ReceivedMessages(
        MessageReader("gzip", MOST),
        2**20,
        lambda _: None,
        ConnectionQueue(ParseScheduler()),
        account,
    )
    body = zlib.compress(bytes(MOST - 1), 1, 31)
    messages.feed(pack_prefix(1, len(body)) + body, 0)
    reading = asyncio.create_task(next_of(messages))
    await _passes_until_held(messages, len(body) + 8 * INFLATED_BYTES)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert account.held == messages.held == len(body)
    messages.feed(pack_prefix(0, 1) + b"a", 0)
    assert await next_of(messages) == bytes(MOST - 1)
    assert await next_of(messages) == b"a"
    assert account.held == 0


def test_large_message_is_handed_over_without_a_copy() -> None:
    reader, body = MessageReader("identity", MOST), bytes(range(256)) * 2**18
    data = pack_prefix(0, len(body)) + body + pack_prefix(0, 2) + b"ab" + pack_prefix(0, 3)
    for at in range(0, len(data), 2**16):
        reader.add(data[at : at + 2**16])
    tracemalloc.start()
    try:
        compressed, taken = reader.take()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (compressed, taken) == (False, body)
    assert most < 2**20
    assert reader.take() == (False, b"ab")
    assert (reader.size, reader.missing) == (5, 3)


def plain() -> tuple[ReceivedMessages, Account]:
    account = Budget(2 * MOST).account(lambda: None)
    reader, queue = MessageReader("identity", MOST), ConnectionQueue(ParseScheduler())
    return ReceivedMessages(reader, 2**20, lambda _: None, queue, account), account


def message(body: bytes) -> bytes:
    return pack_prefix(0, len(body)) + body


@pytest.mark.parametrize("size", [1, 4, 5, 6, 7, 100, 2**16])
async def test_messages_come_whole_and_in_order_however_they_are_cut(size: int) -> None:
    bodies = [b"a", b"", b"b" * 20, b"c" * 2**17, b"d", b"e", b"", b"f" * 300]
    data = b"".join(map(message, bodies))
    received, account = plain()
    for at in range(0, len(data), size):
        received.feed(data[at : at + size], 0)
        assert account.held <= at + size
    assert [await next_of(received) for _ in bodies] == bodies
    assert (received.held, account.held) == (0, 0)
    received.end()
    assert await next_of(received) is None


async def test_whole_messages_alternate_with_parts_of_others() -> None:
    received, account = plain()
    pieces = [message(b"1"), message(b"22")[:3], message(b"22")[3:], message(b"333"), message(b"4")]
    for piece in pieces:
        received.feed(piece, 0)
    assert [await next_of(received) for _ in range(2)] == [b"1", b"22"]
    received.feed(message(b"5"), 0)
    assert [await next_of(received) for _ in range(3)] == [b"333", b"4", b"5"]
    assert account.held == 0


async def test_a_second_message_is_seen_wherever_the_first_is() -> None:
    for first_taken in (False, True):
        received, _ = plain()
        received.feed(message(b"a"), 0)
        assert not received.several
        if first_taken:
            await next_of(received)
            assert not received.several
        received.feed(message(b"")[:1], 0)
        assert received.several


async def test_a_message_that_has_arrived_is_freed_with_the_others() -> None:
    received, account = plain()
    received.feed(message(bytes(2**17)), 0)
    assert await received.arrived() == 2**17
    assert account.held >= 2**17
    received.drop()
    assert account.held == 0
