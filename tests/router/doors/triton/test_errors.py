"""Both Triton doors keep the worker and the retry time of an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from compat.plain_http import PlainHttp
from router.scripted import (
    READY,
    RouterClient,
    ScriptedEngine,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_fleet import refusal
from trtmesh.chassis.error_wire import from_status
from trtmesh.chassis.errors import BackendFailed, OutOfBlocks, TrtmeshError
from trtmesh.kserve import grpc_service_pb2 as kserve

SERVICE = "/inference.GRPCInferenceService/"
INPUTS = {"input_ids": [5], "input_lengths": [1], "request_output_len": [3]}

pytestmark = pytest.mark.parametrize("kind", [OutOfBlocks, BackendFailed])


@asynccontextmanager
async def doors(*decoupled: str) -> AsyncIterator[tuple[ScriptedEngine, RouterClient]]:
    engine = ScriptedEngine(supported_fields=["stopping.max_tokens", "stopping.ignore_end_id"])
    triton, http = {"decoupled": decoupled}, {"port": 0}
    async with (
        serving_engine(engine) as address,
        serving_router([address], triton=triton, http=http) as client,
    ):
        await until_states(client, [READY], [])
        yield engine, client


async def refused(engine: ScriptedEngine, kind: type[TrtmeshError], call: Awaitable[Any]) -> Any:
    """The outcome of a call whose item the worker ends with an error."""
    outcome = asyncio.ensure_future(call)
    (submit,) = await engine.submitted()
    error = kind("it broke", worker="w", retry_after_ms=1500)
    await engine.step(ends=[refusal(submit.handle, error)])
    await asyncio.wait([outcome])
    return outcome.exception() or outcome.result()


def message() -> kserve.ModelInferRequest:
    sent = kserve.ModelInferRequest(model_name="tensorrt_llm")
    for name, numbers in INPUTS.items():
        given = sent.inputs.add(name=name, datatype="INT32", shape=(1, len(numbers)))
        given.contents.int_contents.extend(numbers)
    return sent


def check_status(status: Any, kind: type[TrtmeshError]) -> None:
    assert isinstance(status, grpc.aio.AioRpcError)
    metadata = status.trailing_metadata()
    assert dict(metadata)["trtmesh-retry-after-ms"] == "1500"
    error = from_status(status.code(), status.details() or "", metadata)
    assert (type(error), error.worker, error.retry_after_ms) == (kind, "w", 1500)


async def test_unary_call_ends_with_the_data_in_its_metadata(kind: type[TrtmeshError]) -> None:
    async with (
        doors() as (engine, client),
        grpc.aio.insecure_channel(client.addresses[0]) as channel,
    ):
        infer: Any = channel.unary_unary(f"{SERVICE}ModelInfer")
        check_status(await refused(engine, kind, infer(message().SerializeToString())), kind)


async def test_stream_ended_by_errors_carries_the_data_in_its_metadata(
    kind: type[TrtmeshError],
) -> None:
    async with (
        doors("tensorrt_llm") as (engine, client),
        grpc.aio.insecure_channel(client.addresses[0]) as channel,
    ):
        infer: Any = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        metadata = (("triton_grpc_error", "true"),)
        stream = infer(iter([message().SerializeToString()]), metadata=metadata)
        check_status(await refused(engine, kind, stream.read()), kind)


async def test_http_answer_has_the_time_to_retry(kind: type[TrtmeshError]) -> None:
    async with doors() as (engine, client), PlainHttp(client.http_address) as http:
        reply = await refused(engine, kind, http.post("/v2/models/tensorrt_llm/generate", INPUTS))
        row = kind("").row
        assert reply.status == row.http
        assert reply.headers["Retry-After"] == "2"
        assert reply.headers["trtmesh-error-reason"] == row.reason
