"""Calls that wait for their clients have a sum."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from chassis.grpc.server.wire import Wire, message, wired
from trtmesh.chassis.connection_settings import ConnectionSettings
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.health import Health
from trtmesh.chassis.http2.frames import ErrorCode, FrameType, Setting, window_update

EXHAUSTED = str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])

HEALTH_WATCH = {":path": "/grpc.health.v1.Health/Watch"}


@pytest_asyncio.fixture
async def small() -> AsyncIterator[Example]:
    """A server with room for eight idle calls."""
    server = GrpcServer(MOST_BYTES, connections=ConnectionSettings(max_open=4))
    await Health(()).register(server)
    async with serving(Example(server=server)) as example:
        yield example


async def finish(wire: Wire, stream: int) -> None:
    """Checks that an idle call still works."""
    wire.send(wire.data(stream, b"late"))
    assert (await wire.answer(stream))[0] == message(b"late")


@pytest.mark.parametrize("method", ["Join", "Echo"])
async def test_the_client_with_most_idle_calls_loses_its_latest(
    small: Example, method: str
) -> None:
    async with wired(small) as many, wired(small) as few:
        for stream in range(1, 13, 2):
            many.send(many.call(stream, method))
        await many.echoes(13)
        few.send(*(few.call(stream, method) for stream in (1, 3, 5)))
        _, said = await many.answer(11)
        assert said["grpc-status"] == EXHAUSTED
        assert small.server.clients.idle.held == 8
        for wire, streams in ((few, (1, 3, 5)), (many, (1, 3, 5, 7, 9))):
            for stream in streams:
                await finish(wire, stream)
        assert small.server.clients.idle.held == 0


async def test_calls_with_their_requests_are_not_idle(small: Example) -> None:
    async with wired(small) as busy, wired(small) as idle:
        for stream in range(1, 41, 2):
            busy.send(busy.call(stream, "Wait"), busy.data(stream, b""))
        await busy.echoes(41)
        assert small.server.clients.idle.held == 0
        idle.send(*(idle.call(stream, "Join") for stream in range(1, 15, 2)))
        await idle.echoes(15)
        assert small.server.clients.idle.held == 7
        for stream in range(1, 15, 2):
            await finish(idle, stream)
        idle.send(idle.call(17, "Join"), idle.call(19, "Echo"))
        await idle.echoes(21)
        assert small.server.clients.idle.held == 2
    while small.server.clients.idle.held:  # noqa: ASYNC110 - a count sets no event
        await asyncio.sleep(0)


async def test_a_client_that_watches_health_is_idle(small: Example) -> None:
    async with wired(small) as wire, wired(small) as other:
        for stream in range(1, 17, 2):
            wire.send(wire.call(stream, changes=HEALTH_WATCH), wire.data(stream, b""))
        await wire.next(FrameType.DATA, stream=15)
        assert small.server.clients.idle.held == 8
        await other.echoes(1)
        _, said = await wire.answer(15)
        assert said["grpc-status"] == EXHAUSTED
        assert small.server.clients.idle.held == 7


@pytest.mark.parametrize("method", ["Whole", "Many", "CutOff"])
async def test_a_client_that_reads_no_answer_is_idle(small: Example, method: str) -> None:
    """Each call costs some KiB, however short its answer is."""
    asked = b"1,100" if method == "Many" else b"100"
    windows = {Setting.INITIAL_WINDOW_SIZE: 10}
    async with wired(small, windows) as wire, wired(small) as other:
        for stream in range(1, 17, 2):
            wire.send(wire.call(stream, method), wire.data(stream, asked))
            await wire.next(FrameType.DATA, stream=stream)
        assert small.server.clients.idle.held == 8
        wire.send(wire.call(17, method))
        _, said = await wire.answer(17)
        assert said["grpc-status"] == EXHAUSTED
        await other.echoes(1)
        reset = await wire.next(FrameType.RST_STREAM, stream=15)
        assert ErrorCode.parse(reset.payload) is ErrorCode.ENHANCE_YOUR_CALM
        assert small.server.clients.idle.held == 7
        wire.send(window_update(1, 1000))
        _, said = await wire.answer(1)
        assert said["grpc-status"] == "0"
        assert small.server.clients.idle.held == 6
