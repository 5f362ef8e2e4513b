"""Admission as clients see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
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
from trtmesh.chassis.errors import InvalidField, QueueFull, QueueTimeout, RateLimited
from trtmesh.router.callers.key_file import ListedKey, digest_of
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc


@asynccontextmanager
async def door(**settings: Any) -> AsyncIterator[tuple[ScriptedEngine, RouterClient]]:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens", "priority"])
    async with serving_engine(engine) as address, serving_router([address], **settings) as client:
        await until_states(client, [READY], [])
        yield engine, client


async def finish(engine: ScriptedEngine, number: int) -> None:
    submit = (await engine.submitted(number + 1))[number]
    await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])


def call(client: RouterClient, ids: list[int], **options: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(client.complete([ids], text=False, max_tokens=9, **options))


async def test_items_beyond_the_limit_wait_by_priority_and_the_queue_is_bounded() -> None:
    async with door(admission={"max_running_items": 1, "max_queued_items": 2}) as (engine, client):
        running = call(client, [1])
        await engine.submitted()
        waiting = [call(client, [2], priority=0)]
        while (await client.status()).live_requests < 2:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
        waiting.append(call(client, [3], priority=5))
        while (await client.status()).live_requests < 3:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.005)
        with pytest.raises(QueueFull, match="Exceeds maximum queue size") as refused:
            await call(client, [4])
        assert refused.value.retry_after_ms == 1000
        assert len(engine.submits) == 1
        for number in range(3):
            await finish(engine, number)
        await asyncio.gather(running, *waiting)
        assert [list(submit.token_ids) for submit in engine.submits] == [[1], [3], [2]]


async def test_queued_item_times_out() -> None:
    async with door(admission={"max_running_items": 1, "queue_seconds": 0.01}) as (engine, client):
        running = call(client, [1])
        await engine.submitted()
        (item,) = await call(client, [2])
        assert isinstance(item.error, QueueTimeout)
        assert item.error.retry_after_ms
        await finish(engine, 0)
        await running


async def test_request_larger_than_the_limit_is_invalid() -> None:
    async with door(admission={"max_running_items": 1, "max_queued_items": 2}) as (_, client):
        with pytest.raises(InvalidField) as refused:
            await client.complete([[1]] * 4, text=False, max_tokens=9)
        error = refused.value
        assert (error.field, error.value, error.limit) == ("items", "4", "at most 3")


async def test_tokens_are_charged_with_each_step() -> None:
    async with door(rate_limit={"tokens_per_second": 1e-6, "burst_tokens": 10}) as (engine, client):
        streaming = call(client, [1] * 5)
        (submit,) = await engine.submitted()
        second = call(client, [2])
        await engine.submitted(2)
        await engine.step((submit.handle, 0, [7] * 5))
        await eventually(lambda: client.gauge("tokens_out_total", model="m") == 5)
        with pytest.raises(RateLimited):
            await call(client, [3])
        await finish(engine, 1)
        await engine.step((submit.handle, 5, [7]), ends=[(submit.handle, LENGTH)])
        await asyncio.gather(streaming, second)


async def test_key_without_tokens_left_is_refused_with_a_hint(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"{ListedKey(name, digest_of(name))}\n" for name in ("one", "two")))
    async with (
        door(
            rate_limit={"tokens_per_second": 1.0, "burst_tokens": 10},
            api_keys={"file": keys, "optional": True},
        ) as (engine, client),
        grpc.aio.insecure_channel(client.address) as channel,
    ):
        stub = router_pb2_grpc.MeshServiceStub(channel)
        request = router_pb.GenerateRequest(
            items=[router_pb.GenerateItem(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1] * 50)))],
            config=pb.GenerationConfig(output=pb.OutputConfig(text=False)),
        )

        async def ask(key: str) -> None:
            async for _ in stub.Generate(request, metadata=(("x-api-key", key),)):
                pass

        first = asyncio.create_task(ask("one"))
        await finish(engine, 0)
        await first
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask("one")
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        metadata = dict(refused.value.trailing_metadata() or ())
        assert metadata["trtmesh-error-reason"] == "RATE_LIMITED"
        assert 30_000 < int(metadata["trtmesh-retry-after-ms"]) <= 42_001
        second = asyncio.create_task(ask("two"))
        await finish(engine, 1)
        await second


async def test_large_requests_have_a_sum_until_they_end() -> None:
    limits = {"max_request_bytes": 2**20}
    async with door(admission=limits, triton={"enabled": False}) as (engine, client):
        held = client.router._admission.request_bytes
        tokens = [2**20] * 200_000
        first = asyncio.create_task(client.complete([tokens], text=False, max_tokens=9))
        await engine.submitted()
        assert held.held > 3 * len(tokens)
        with pytest.raises(QueueFull, match="max_request_bytes"):
            await client.complete([tokens], text=False, max_tokens=9)
        with pytest.raises(InvalidField, match=r"at most 1048576 .*max_request_bytes") as refused:
            await client.complete([tokens * 2], text=False, max_tokens=9)
        assert refused.value.retry_after_ms is None
        small = asyncio.create_task(client.complete([[1]], text=False, max_tokens=9))
        await finish(engine, 1)
        await small
        await finish(engine, 0)
        await first
        assert held.held == 0
        again = asyncio.create_task(client.complete([tokens], text=False, max_tokens=9))
        await finish(engine, 2)
        await again


async def test_what_a_resumed_request_received_counts_with_it() -> None:
    limits = {"max_request_bytes": 2**18}
    async with door(admission=limits, triton={"enabled": False}) as (_, client):
        resume = router_pb.ResumeRequest()
        resume.request.request_id = "r"
        resume.request.items.add().prompt.text = "x"
        resume.received.add(token_ids=[2**20] * 100_000)
        async with grpc.aio.insecure_channel(client.address) as channel:
            call = router_pb2_grpc.MeshServiceStub(channel).Resume(resume)
            with pytest.raises(grpc.aio.AioRpcError, match="max_request_bytes"):
                await call.read()
