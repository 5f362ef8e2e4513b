"""Outcomes of generation calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
from router.scripted import (
    LENGTH,
    READY,
    RouterClient,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from trtmesh.chassis.errors import AlreadyExists
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc

OUTCOMES = ("refused", "cancelled", "complete")


@asynccontextmanager
async def door() -> AsyncIterator[tuple[ScriptedEngine, RouterClient]]:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    async with serving_engine(engine) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        yield engine, client


def call(client: RouterClient) -> asyncio.Task[object]:
    return asyncio.create_task(client.complete([[1]], text=False, max_tokens=9, request_id="r"))


def counted(client: RouterClient) -> dict[str, float]:
    """The outcomes counted so far."""
    name = "trtmesh_router_requests_total"
    counts = {o: client.registry.get_sample_value(name, {"outcome": o}) for o in OUTCOMES}
    return {outcome: count for outcome, count in counts.items() if count}


async def finish(engine: ScriptedEngine, number: int) -> None:
    submit = (await engine.submitted(number + 1))[number]
    await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])


async def drained(stream: Any) -> grpc.StatusCode:
    """Reads a stream to the end; returns the status."""
    with suppress(grpc.aio.AioRpcError):
        async for _ in stream:
            pass
    status: grpc.StatusCode = await stream.code()
    return status


async def test_finished_call_is_complete() -> None:
    async with door() as (engine, client):
        running = call(client)
        await finish(engine, 0)
        await running
        await eventually(lambda: counted(client) == {"complete": 1})


async def test_call_without_a_permit_is_refused() -> None:
    async with door() as (engine, client):
        running = call(client)
        await engine.submitted()
        with pytest.raises(AlreadyExists):
            await call(client)
        await eventually(lambda: counted(client) == {"refused": 1})
        await finish(engine, 0)
        await running


async def test_call_left_by_the_client_counts_as_cancelled() -> None:
    async with door() as (engine, client):
        running = call(client)
        await engine.submitted()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await eventually(lambda: counted(client) == {"cancelled": 1})


async def test_call_ended_by_the_router_counts_as_cancelled_and_raises_the_error() -> None:
    request = router_pb.GenerateRequest(
        request_id="r",
        config=pb.GenerationConfig(
            stopping=pb.StoppingConfig(max_tokens=9), output=pb.OutputConfig(text=False)
        ),
        items=[router_pb.GenerateItem(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1])))],
    )
    async with door() as (engine, client):
        stub = router_pb2_grpc.MeshServiceStub(client._routers[0].channel)
        ended = asyncio.create_task(drained(stub.Generate(request)))
        await engine.submitted()
        resumed = asyncio.create_task(
            drained(stub.Resume(router_pb.ResumeRequest(request=request)))
        )
        assert await ended == grpc.StatusCode.UNAVAILABLE
        await finish(engine, 1)
        assert await resumed == grpc.StatusCode.OK
        await eventually(lambda: counted(client) == {"cancelled": 1, "complete": 1})
