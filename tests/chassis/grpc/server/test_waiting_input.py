"""Input that waits for a turn counts as unread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from chassis.grpc.server.wire import wired
from chassis.withheld_turns import WithheldTurns
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.http2.connection import MIN_COUNTED_BYTES
from trtmesh.chassis.http2.frames import ErrorCode, FrameType, frame

IGNORED = frame(99, 0, 0, bytes(2**13)) * 100
"""Frames of an extension, of which nothing is held once they are parsed."""


@asynccontextmanager
async def withheld(max_message_bytes: int) -> AsyncIterator[tuple[Example, WithheldTurns]]:
    """A server whose connections wait for their turns."""
    server, turns = GrpcServer(max_message_bytes), WithheldTurns()
    server.clients.turns = turns
    async with serving(Example(server=server)) as example:
        yield example, turns


async def give_until(turns: WithheldTurns, done: Callable[[], bool]) -> None:
    while not done():
        turns.give()
        await asyncio.sleep(0)


async def test_input_that_waits_for_a_turn_counts() -> None:
    async with withheld(MOST_BYTES) as (example, turns), wired(example) as wire:
        wire.send(IGNORED)
        budget = example.server.clients.budget
        await give_until(turns, lambda: budget.held > 0)
        assert budget.held >= MIN_COUNTED_BYTES
        echoing = asyncio.create_task(wire.echoes(1))
        await give_until(turns, echoing.done)
        await echoing
        assert budget.held == 0


async def test_the_connection_with_most_waiting_input_ends() -> None:
    async with (
        withheld(MIN_COUNTED_BYTES // 2) as (example, turns),
        wired(example) as other,
        wired(example) as wire,
    ):
        greeting = asyncio.create_task(wire.next(FrameType.SETTINGS))
        await give_until(turns, greeting.done)
        await greeting
        wire.send(IGNORED)
        ending = asyncio.create_task(wire.error())
        await give_until(turns, ending.done)
        assert await ending == (0, ErrorCode.ENHANCE_YOUR_CALM)
        assert example.server.clients.budget.held == 0
        echoing = asyncio.create_task(other.echoes(1))
        await give_until(turns, echoing.done)
        await echoing
