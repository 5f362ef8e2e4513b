"""Watchers of a process's health do not concern each other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from chassis.grpc.server.wire import Wire, message, wired
from grpc_health.v1 import health_pb2
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.health import Health
from trtmesh.chassis.http2.frames import ErrorCode, FrameType, Setting, rst_stream

WATCH = {":path": "/grpc.health.v1.Health/Watch"}
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@asynccontextmanager
async def process() -> AsyncIterator[tuple[Example, Health]]:
    health, server = Health(()), GrpcServer(MOST_BYTES)
    await health.register(server)
    async with serving(Example(server=server)) as example:
        yield example, health


def watch(wire: Wire, service: str = "") -> None:
    request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    wire.send(wire.call(1, changes=WATCH), wire.data(1, request))


async def told(wire: Wire) -> int:
    data = (await wire.next(FrameType.DATA, stream=1)).payload
    status: int = health_pb2.HealthCheckResponse.FromString(data[len(message(b"")) :]).status
    return status


async def test_a_watcher_that_reads_nothing_holds_up_no_change() -> None:
    no_window = {Setting.INITIAL_WINDOW_SIZE: 0}
    async with (
        process() as (example, health),
        wired(example, no_window) as stalled,
        wired(example) as reader,
    ):
        watch(stalled)
        await stalled.next(FrameType.HEADERS)
        watch(reader)
        assert await told(reader) == NOT_SERVING
        await health.well("start")
        assert await told(reader) == SERVING


async def test_a_watcher_that_leaves_takes_no_news_from_the_others() -> None:
    async with process() as (example, health), wired(example) as one, wired(example) as other:
        for wire in (one, other):
            watch(wire)
            assert await told(wire) == NOT_SERVING
        one.send(rst_stream(1, ErrorCode.CANCEL))
        await one.echoes(3)
        await health.well("start")
        assert await told(other) == SERVING


async def test_an_unknown_service_may_become_known() -> None:
    async with process() as (example, health), wired(example) as wire:
        watch(wire, "adapters")
        assert await told(wire) == UNKNOWN
        await health.tell("adapters", "stale")
        assert await told(wire) == NOT_SERVING
        await health.tell("adapters", "")
        assert await told(wire) == SERVING


async def test_a_process_without_progress_is_live() -> None:
    """Orchestrators that restart by `live` leave a busy, loading or draining process alone."""
    async with process() as (example, health), wired(example) as live, wired(example) as ready:
        watch(live, "live")
        watch(ready)
        assert (await told(live), await told(ready)) == (SERVING, NOT_SERVING)
        await health.well("start")
        assert await told(ready) == SERVING
        await health.unwell("progress", "no step for 10 s")
        assert await told(ready) == NOT_SERVING
        watch_again = health_pb2.HealthCheckRequest(service="live").SerializeToString()
        live.send(live.call(3, changes=WATCH), live.data(3, watch_again))
        data = (await live.next(FrameType.DATA, stream=3)).payload
        answer = health_pb2.HealthCheckResponse.FromString(data[len(message(b"")) :])
        assert answer.status == SERVING
