"""Outcomes of generation calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self, cast

import grpc
import pytest
from compat.plain_http import PlainHttp
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
from router.scripted_fleet import refusal
from trtmesh.chassis.errors import (
    AlreadyExists,
    BackendFailed,
    Draining,
    QueueFull,
    TrtmeshError,
)
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.doors.generation import GenerationCall, RunningCall
from trtmesh.router.metrics import CHAT, Latencies, ModelMetrics
from trtmesh.router.requests.requests import RunningRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc

MODEL = "m"
TRITON = "/inference.GRPCInferenceService/"


@asynccontextmanager
async def door() -> AsyncIterator[tuple[ScriptedEngine, RouterClient]]:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    async with serving_engine(engine) as address, serving_router([address]) as client:
        await until_states(client, [READY], [])
        yield engine, client


def call(client: RouterClient) -> asyncio.Task[object]:
    return asyncio.create_task(client.complete([[1]], text=False, max_tokens=9, request_id="r"))


def counted(client: RouterClient) -> Mapping[str, int]:
    """The outcomes counted so far."""
    name = "trtmesh_router_requests_total"
    counts = Counter[str]()
    for family in client.registry.collect():
        for sample in family.samples:
            if sample.name == name and sample.labels["model"] == MODEL:
                counts[sample.labels["outcome"]] += int(sample.value)
    return counts


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


def message(model: str = "tensorrt_llm", rows: int = 1, length: int = 3) -> bytes:
    sent = kserve.ModelInferRequest(model_name=model)
    for name, number in (("input_ids", 5), ("input_lengths", 1), ("request_output_len", length)):
        given = sent.inputs.add(name=name, datatype="INT32", shape=(rows, 1))
        given.contents.int_contents.extend([number] * rows)
    return sent.SerializeToString()


class Doors:
    """A call through each door."""

    def __init__(self, client: RouterClient, channel: grpc.aio.Channel, http: PlainHttp) -> None:
        self._client, self._channel, self._http = client, channel, http

    async def native(self, rows: int = 1, length: int = 3) -> object:
        return await self._client.complete([[5]] * rows, text=False, max_tokens=length)

    async def unary(self, rows: int = 1, length: int = 3) -> object:
        infer: Any = self._channel.unary_unary(f"{TRITON}ModelInfer")
        return await infer(message("whole", rows, length))

    async def stream(self, rows: int = 1, length: int = 3) -> object:
        infer: Any = self._channel.stream_stream(f"{TRITON}ModelStreamInfer")
        return [one async for one in infer(iter([message("parts", rows, length)]))]

    async def infer(self, rows: int = 1, length: int = 3) -> object:
        inputs = [
            {"name": name, "datatype": "INT32", "shape": [rows, 1], "data": [number] * rows}
            for name, number in (
                ("input_ids", 5),
                ("input_lengths", 1),
                ("request_output_len", length),
            )
        ]
        return await self._http.post("/v2/models/whole/infer", {"inputs": inputs})

    async def generate(self, rows: int = 1, length: int = 3) -> object:
        return await self._http.post("/v2/models/whole/generate", body(length))

    async def generate_stream(self, rows: int = 1, length: int = 3) -> object:
        return await self._http.post("/v2/models/parts/generate_stream", body(length))


def body(length: int) -> dict[str, Any]:
    return {"input_ids": [5], "input_lengths": 1, "request_output_len": length}


DOORS = ("native", "unary", "stream", "infer", "generate", "generate_stream")


@pytest.mark.parametrize("name", DOORS)
async def test_outcomes_are_equal_on_all_doors(name: str) -> None:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens", "stopping.ignore_end_id"])
    models = {
        "whole": {"template": "tensorrt_llm", "decoupled": False},
        "parts": {"template": "tensorrt_llm", "decoupled": True},
    }
    async with (
        serving_engine(engine) as address,
        serving_router([address], triton={"models": models}, http={"port": 0}) as client,
        grpc.aio.insecure_channel(client.addresses[0]) as channel,
        PlainHttp(client.http_address) as http,
    ):
        await until_states(client, [READY], [])
        ask = getattr(Doors(client, channel, http), name)
        whole = asyncio.create_task(ask())
        await finish(engine, 0)
        await whole
        await eventually(lambda: counted(client) == {"complete": 1})
        # A list of ids is one row of a JSON body.
        for failed, rows in enumerate((1, 1 if name.startswith("generate") else 2), 1):
            submits = len(engine.submits)
            broken = asyncio.create_task(ask(rows))
            *others, last = (await engine.submitted(submits + rows))[submits:]
            await engine.step(ends=[refusal(last.handle, BackendFailed("it broke"))])
            for other in others:
                await engine.step((other.handle, 0, [7]), ends=[(other.handle, LENGTH)])
            await asyncio.wait([broken])
            await eventually(lambda: counted(client) == {"complete": 1, "failed": failed})  # noqa: B023
        await asyncio.wait([asyncio.create_task(ask(length=0))])
        await eventually(lambda: counted(client) == {"complete": 1, "failed": 2, "refused": 1})


class Opening:
    """A request that its router refuses, or ends later."""

    def __init__(self, refusal: TrtmeshError | None) -> None:
        self._refusal = refusal
        self.failure, self.ended = "", None if refusal else Draining("it stops")
        self.latencies, self.trace_id, self.context = Latencies(), "t" * 32, self

    async def __aenter__(self) -> Self:
        if self._refusal is not None:
            raise self._refusal
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("refusal", [QueueFull("full"), None])
async def test_error_that_a_door_answers_itself_is_counted(refusal: TrtmeshError | None) -> None:
    """A stream of events ends with an event where others raise."""
    metrics, opening = ModelMetrics(), Opening(refusal)
    with GenerationCall("openai", metrics, CHAT) as call, suppress(QueueFull, Draining):
        async with RunningCall(call, cast(RunningRequest, opening)):
            raise asyncio.CancelledError
    counted = metrics.latencies[CHAT] if refusal else opening.latencies
    outcome, reason = ("refused", "QUEUE_FULL") if refusal else ("cancelled", "DRAINING")
    assert metrics.requests == {("openai", outcome): 1}
    assert [*counted.request_duration] == [reason]


async def test_requests_without_a_model_count_for_the_default_one() -> None:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens"])
    other = ScriptedEngine(worker="other", model="other")
    async with (
        serving_engine(engine) as address,
        serving_engine(other) as other_address,
        serving_router([address, other_address], models=(MODEL, "other")) as client,
    ):
        await until_states(client, [READY, READY], [])
        whole = call(client)
        await finish(engine, 0)
        await whole
        await eventually(lambda: counted(client) == {"complete": 1})
