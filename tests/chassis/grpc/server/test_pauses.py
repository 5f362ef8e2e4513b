"""Clients that stop reading for a while and still answer PINGs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from chassis.grpc.server.wire import Wire, message, wired
from trtmesh.chassis.grpc.server import GrpcServer, call
from trtmesh.chassis.http2 import connection as http2_connection
from trtmesh.chassis.http2.frames import (
    ACK,
    INITIAL_WINDOW_SIZE,
    ErrorCode,
    FrameType,
    frame,
    window_update,
)
from trtmesh.router.streams import client_stream

MESSAGES, MESSAGE_BYTES = 60, 2**20
PINGS = 4
ANSWER_BYTES = 4 * INITIAL_WINDOW_SIZE
"""Of Many with `1,ANSWER_BYTES`, and of Whole."""


@asynccontextmanager
async def impatient(unread_seconds: float) -> AsyncIterator[Example]:
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(call, "UNREAD_SECONDS", unread_seconds)
        async with serving(Example(server=GrpcServer(MOST_BYTES))) as example:
            yield example


@pytest.fixture
def frequent_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(http2_connection, "PING_TIMEOUT_SECONDS", 0.5)


def test_a_minute_is_within_the_default_limits() -> None:
    limits = (client_stream.UNREAD_SECONDS, call.UNREAD_SECONDS, http2_connection.PAUSE_SECONDS)
    assert min(limits) > 60


async def answer_pings(wire: Wire, count: int) -> int:
    """Answers PINGs and gives no window; returns the bytes that came meanwhile."""
    received = 0
    while count:
        found = await wire.next(FrameType.DATA, FrameType.PING)
        if found.type == FrameType.DATA:
            received += len(found.payload)
        elif not found.flags & ACK:
            wire.send(frame(FrameType.PING, ACK, 0, found.payload))
            count -= 1
    return received


@pytest.mark.usefixtures("frequent_pings")
async def test_stream_goes_on_where_its_reader_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 MiB, of which the windows hold 64 KiB."""
    async with impatient(3600) as example, wired(example) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"%d,%d" % (MESSAGES, MESSAGE_BYTES)))
        held = await answer_pings(wire, PINGS)
        assert held == INITIAL_WINDOW_SIZE
        # The handler waits for the reader: nothing piles up.
        assert example.written == 0
        # A slow machine takes longer to send it all than these PINGs admit.
        monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 60.0)
        whole = (len(message(b"")) + MESSAGE_BYTES) * MESSAGES
        wire.send(window_update(0, whole), window_update(1, whole))
        body, said = await wire.answer(1)
        assert said["grpc-status"] == "0"
        assert held + len(body) == whole
        for number in range(1, MESSAGES):
            start = number * (MESSAGE_BYTES + 5) - held
            assert body[start : start + MESSAGE_BYTES + 5] == message(
                bytes((number,)) * MESSAGE_BYTES
            )


@pytest.mark.usefixtures("frequent_pings")
async def test_whole_answer_waits_for_its_reader() -> None:
    async with impatient(3600) as example, wired(example) as wire:
        wire.send(wire.call(1, "Whole"), wire.data(1, b"%d" % ANSWER_BYTES))
        held = await answer_pings(wire, PINGS)
        wire.send(window_update(0, ANSWER_BYTES), window_update(1, ANSWER_BYTES))
        body, said = await wire.answer(1)
        assert (held + len(body), said["grpc-status"]) == (ANSWER_BYTES + 5, "0")
        assert unread(example) == 0


@pytest.mark.parametrize("method", ["Whole", "CutOff"])
async def test_answer_that_nobody_reads_is_given_up(method: str) -> None:
    """An answer of a single message, and what is left of a stream when its call ends."""
    async with impatient(0.2) as example, wired(example) as wire:
        wire.send(wire.call(1, method), wire.data(1, b"%d" % ANSWER_BYTES))
        assert await wire.error() == (1, ErrorCode.CANCEL)
        assert unread(example) == 0
        wire.send(window_update(0, ANSWER_BYTES))
        await wire.echoes(3)
        (connection,) = example.server.clients.open
        assert not connection.has_calls


async def test_slow_reader_is_no_stalled_one() -> None:
    """It reads for longer than the limit, but something all the time."""
    async with impatient(4.0) as example, wired(example) as wire:
        wire.send(wire.call(1, "Whole"), wire.data(1, b"%d" % ANSWER_BYTES))
        wire.send(window_update(0, ANSWER_BYTES))
        for _ in range(30):
            await asyncio.sleep(0.15)
            wire.send(window_update(1, 100))
        wire.send(window_update(1, ANSWER_BYTES))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (ANSWER_BYTES + 5, "0")


async def test_stream_is_left_to_its_handler() -> None:
    async with impatient(0.05) as example, wired(example) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,%d" % ANSWER_BYTES))
        await asyncio.sleep(0.3)
        wire.send(window_update(0, ANSWER_BYTES), window_update(1, ANSWER_BYTES))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (ANSWER_BYTES + 5, "0")


def unread(example: Example) -> int:
    held: int = example.server.clients.answers.held
    return held
