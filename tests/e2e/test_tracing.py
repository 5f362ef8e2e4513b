"""Traces as a collector gets them: a trace an item, over every door, worker and end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import aiohttp
import pytest
import tritonclient.grpc.aio as triton_grpc
from compat.triton import make_inputs
from e2e.mesh import (
    ENDLESS,
    INSIDE,
    PATIENT,
    SIMULATED,
    Mesh,
    eventually,
    running_mesh,
    scrape,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from otlp_receiver import (
    ERROR,
    SERVER,
    TRANSPORTS,
    Collector,
    Received,
    by_grpc,
    endpoint,
    values_of,
)
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.tracing.spans import TraceContext, new_span_id, new_trace_id

TEXT = "a secret of the prompt"
KEY = "sk-a-secret-key-of-a-caller"
DROPPED = "trtmesh_dropped_spans_total"
SERVICES = ("trtmesh-engine", "trtmesh-router", "trtmesh-tokenizer")


@pytest.fixture
async def collector(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Collector]:
    """A receiver, to which all processes export that start from now on: by gRPC unless a test names the transport."""
    async with TRANSPORTS[getattr(request, "param", "grpc")](Received()) as running:
        for name, value in running.variables.items():
            monkeypatch.setenv(name, value)
        yield running


@asynccontextmanager
async def workers(*roles: str, router_flags: Sequence[str] = PATIENT) -> AsyncIterator[Mesh]:
    """A tokenizer, a router, and a worker for each role."""

    async def start(mesh: Mesh) -> None:
        engines = [
            mesh.start_engine(*SIMULATED, "--worker", f"w{number}", "--role", role)
            for number, role in enumerate(roles)
        ]
        _, *started = await asyncio.gather(mesh.start_tokenizer(), *engines)
        mesh.engines[:] = started
        await mesh.start_router(*router_flags)
        await mesh.ready(len(roles), 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


def a_caller(*, sampled: bool = True) -> TraceContext:
    return TraceContext(new_trace_id(), new_span_id(), sampled)


def traced_by(caller: TraceContext) -> dict[str, Any]:
    return {"metadata": [("traceparent", str(caller))]}


async def whole(received: Received, caller: TraceContext, spans: int = 1) -> Sequence[Span]:
    """Waits for the spans of a caller's trace: those of the door, and of everything below."""
    trace = f"{caller.trace_id:032x}"

    def doors() -> list[Span]:
        return [each for each in received.of_trace(trace) if each.kind == SERVER]

    await received.until(lambda: len(doors()) >= spans and not orphans(received, caller))
    return received.of_trace(trace)


def orphans(received: Received, caller: TraceContext) -> list[str]:
    """Spans whose parent did not come, but for the caller's own."""
    spans = received.of_trace(f"{caller.trace_id:032x}")
    known = {each.span_id for each in spans} | {caller.span_id.to_bytes(8)}
    return [each.name for each in spans if each.parent_span_id not in known]


def below(parent: Span, spans: Sequence[Span]) -> list[Span]:
    children = [each for each in spans if each.parent_span_id == parent.span_id]
    return sorted(children, key=lambda each: each.start_time_unix_nano)


def operations(spans: Sequence[Span]) -> list[str]:
    return [each.name.split()[0] for each in spans]


def events_of(span: Span) -> dict[str, Any]:
    return {each.name: values_of(each) for each in span.events}


@pytest.mark.parametrize("collector", TRANSPORTS, indirect=True)
async def test_item_is_a_trace_through_all_services(collector: Collector) -> None:
    received, caller = collector.received, a_caller()
    async with workers("mixed") as mesh:
        events = mesh.client.generate([TEXT], max_tokens=5, seed=2**64 - 1, **traced_by(caller))
        told = [event async for event in events]
        await received.until(lambda: len(received.of_trace(f"{caller.trace_id:032x}")) == 11)
    assert told
    spans = await whole(received, caller)
    (door,) = [each for each in spans if each.kind == SERVER]
    assert door.name == "text_completion demo"
    assert door.parent_span_id == caller.span_id.to_bytes(8)
    (item,) = below(door, spans)
    assert operations(below(item, spans)) == ["queue", "encode", "place", "leg"]
    _, encode, _, leg = below(item, spans)
    assert operations(below(encode, spans)) == ["tokenize"]
    (generate,) = below(leg, spans)
    assert operations(below(generate, spans)) == ["queue", "prefill", "decode"]
    by_service = {received.service_of(each) for each in spans}
    assert by_service == set(SERVICES)
    assert received.service_of(generate) == "trtmesh-engine"
    decode = values_of(below(generate, spans)[2])
    assert decode["trtmesh.last_step"] - decode["trtmesh.first_step"] == 4
    about = values_of(item)
    assert about["gen_ai.usage.output_tokens"] == about["gen_ai.usage.completion_tokens"] == 5
    assert about["gen_ai.usage.input_tokens"] == values_of(generate)["trtmesh.prompt_tokens"]
    assert about["gen_ai.request.max_tokens"] == 5
    assert about["gen_ai.request.seed"] == str(2**64 - 1)
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert about["gen_ai.latency.time_to_first_token"] > 0
    assert list(events_of(item)) == ["first_token"]
    assert values_of(leg)["trtmesh.worker"] == "w0"
    assert not any(each.status.code or each.links for each in spans)
    assert_within(spans)
    assert TEXT.encode() not in received.raw


def assert_within(spans: Sequence[Span]) -> None:
    """Every span lies within its parent, by the clock of one machine."""
    known = {each.span_id: each for each in spans}
    for each in spans:
        assert each.start_time_unix_nano <= each.end_time_unix_nano
        if (parent := known.get(each.parent_span_id)) is not None:
            assert each.start_time_unix_nano >= parent.start_time_unix_nano, each.name


async def test_each_door_takes_the_callers_trace(collector: Collector) -> None:
    received = collector.received
    async with workers("mixed") as mesh, aiohttp.ClientSession() as session:
        address, http = mesh.router.address, f"http://{mesh.router.http_address}"

        async def native(headers: Mapping[str, str]) -> None:
            await mesh.client.complete([TEXT], max_tokens=3, metadata=[*headers.items()])

        async def triton(headers: Mapping[str, str]) -> None:
            async with triton_grpc.InferenceServerClient(address) as client:
                inputs = make_inputs({"text_input": TEXT, "max_tokens": 3})
                await client.infer("ensemble", inputs, headers=dict(headers))

        async def post(path: str, body: object, headers: Mapping[str, str]) -> None:
            async with session.post(f"{http}{path}", json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        generate = {"text_input": TEXT, "max_tokens": 3}
        said = {"model": "demo", "max_tokens": 3, "messages": [{"role": "user", "content": TEXT}]}
        text = {"model": "demo", "max_tokens": 3, "prompt": TEXT, "stream": True}
        http_calls = {
            "triton http": ("/v2/models/ensemble/generate", generate),
            "openai chat": ("/v1/chat/completions", said),
            "openai": ("/v1/completions", text),
        }
        calls: dict[str, Callable[[Mapping[str, str]], Awaitable[None]]] = {
            "native": native,
            "triton grpc": triton,
            **{name: partial(post, *given) for name, given in http_calls.items()},
        }
        for name, call in calls.items():
            caller = a_caller()
            await call({"traceparent": str(caller)})
            spans = await whole(received, caller)
            (door,) = [each for each in spans if each.kind == SERVER]
            about = values_of(door)
            operation = "chat" if "chat" in name else "text_completion"
            assert door.name == f"{operation} demo"
            assert about["trtmesh.door"] == name.split()[0]
            assert about["gen_ai.request.stream"] is (name in ("native", "openai"))
            assert about["trtmesh.outcome"] == "complete"
            assert operations(below(door, spans)) == [operation]
    assert TEXT.encode() not in received.raw


async def test_prompts_of_a_call_are_items_of_one_trace(collector: Collector) -> None:
    received, caller = collector.received, a_caller()
    async with workers("mixed") as mesh:
        prompts = [f"{TEXT} {number}" for number in range(5)]
        await mesh.client.complete(prompts, max_tokens=3, **traced_by(caller))
        spans = await whole(received, caller)
        await received.until(
            lambda: len(received.named("generate")) == len(received.named("tokenize")) == 5
        )
    (door,) = [each for each in spans if each.kind == SERVER]
    items = below(door, spans)
    assert sorted(values_of(each)["trtmesh.batch_index"] for each in items) == [*range(5)]
    assert values_of(door)["trtmesh.items"] == 5
    legs = [each for item in items for each in below(item, spans) if each.name == "leg demo"]
    assert len(legs) == 5


async def test_killed_workers_leg_is_linked_to_the_next(collector: Collector) -> None:
    received, caller = collector.received, a_caller()
    async with workers("mixed", "mixed") as mesh:
        reader = mesh.open([TEXT], max_tokens=ENDLESS, ignore_end_id=True, **traced_by(caller))
        await reader.tokens_here(10)
        started = reader.items[0].started
        assert started
        killed = int(started.worker[1])
        mesh.engines[killed].signal(signal.SIGKILL)
        known = reader.tokens()
        await reader.tokens_here(known + 50)
        await reader.stopped_at(10)
        await received.until(lambda: len(received.named("generate")) == 1)
        spans = await whole(received, caller)
    (item,) = below(next(each for each in spans if each.kind == SERVER), spans)
    first, second = (each for each in below(item, spans) if each.name == "leg demo")
    dead, living = f"w{killed}", f"w{1 - killed}"
    assert [values_of(each)["trtmesh.worker"] for each in (first, second)] == [dead, living]
    assert (first.status.code, first.status.message) == (ERROR, "WORKER_LOST")
    assert [each.span_id for each in second.links] == [first.span_id]
    assert below(first, spans) == []
    (generate,) = below(second, spans)
    assert operations(below(generate, spans)) == ["queue", "prefill", "decode"]
    assert values_of(generate)["trtmesh.worker"] == living
    moved = events_of(item)["migrated"]
    assert moved["trtmesh.from"] == dead
    assert moved["trtmesh.to"] == living
    assert moved["trtmesh.reason"] == "worker_lost"
    assert moved["trtmesh.offset"] == values_of(second)["trtmesh.offset"] >= 10
    tokens = sum(values_of(each)["trtmesh.tokens"] for each in (first, second))
    assert tokens == values_of(item)["gen_ai.usage.output_tokens"]
    assert item.status.code == 0


async def test_handoff_links_prefill_and_decode(collector: Collector) -> None:
    received, caller = collector.received, a_caller()
    flags = (*PATIENT, "--handoff-enabled", "always")
    async with workers("prefill", "decode", router_flags=flags) as mesh:
        prompt = list(range(100, 400))
        await mesh.client.complete([prompt], max_tokens=8, **traced_by(caller))
        await received.until(lambda: len(received.named("generate")) == 2)
        spans = await whole(received, caller)
    (item,) = below(next(each for each in spans if each.kind == SERVER), spans)
    prefill, decode = (each for each in below(item, spans) if each.name == "leg demo")
    assert [values_of(each)["trtmesh.worker"] for each in (prefill, decode)] == ["w0", "w1"]
    assert [values_of(each)["trtmesh.tokens"] for each in (prefill, decode)] == [1, 7]
    assert [each.span_id for each in decode.links] == [prefill.span_id]
    assert [operations(below(each, spans)) for each in (prefill, decode)] == [["generate"]] * 2
    handed = events_of(item)["handoff"]
    assert (handed["trtmesh.from"], handed["trtmesh.to"], handed["trtmesh.offset"]) == (
        "w0",
        "w1",
        1,
    )
    assert "migrated" not in events_of(item)
    assert not any(each.status.code for each in spans)


async def test_errors_and_cancels_have_a_status(collector: Collector) -> None:
    received = collector.received
    async with workers("mixed") as mesh:

        async def door_of(caller: TraceContext) -> tuple[Span, Sequence[Span]]:
            spans = await whole(received, caller)
            return next(each for each in spans if each.kind == SERVER), spans

        refused = a_caller()
        with pytest.raises(TrtmeshError):
            await mesh.client.complete([TEXT], model="none", **traced_by(refused))
        door, spans = await door_of(refused)
        assert (door.status.code, door.status.message) == (ERROR, "MODEL_NOT_FOUND")
        assert values_of(door)["error.type"] == "MODEL_NOT_FOUND"
        assert below(door, spans) == []

        failed = a_caller()
        results = await mesh.client.complete(["", TEXT], max_tokens=2, **traced_by(failed))
        assert results[0].error is not None
        door, spans = await door_of(failed)
        items = {values_of(each)["trtmesh.batch_index"]: each for each in below(door, spans)}
        assert [items[index].status.message for index in range(2)] == ["PROMPT_EMPTY", ""]
        assert (door.status.code, door.status.message) == (ERROR, "PROMPT_EMPTY")

        cancelled = a_caller()
        reader = mesh.open([TEXT], max_tokens=ENDLESS, **traced_by(cancelled))
        await reader.tokens_here(3)
        await reader.cancel()
        await received.until(lambda: received.named("generate", f"{cancelled.trace_id:032x}"))
        door, spans = await door_of(cancelled)
        (item,) = below(door, spans)
        told = [door, item, *(each for each in spans if each.name in ("leg demo", "generate demo"))]
        assert len(told) == 4
        assert {each.status.code for each in told} == {ERROR}
        assert item.status.message == "CANCELLED"

        stopped = a_caller()
        await mesh.open([TEXT], max_tokens=ENDLESS, **traced_by(stopped)).stopped_at(3)
        door, spans = await door_of(stopped)
        assert {each.status.code for each in spans} == {0}
        (item,) = below(door, spans)
        assert values_of(item)["gen_ai.response.finish_reasons"] == ["stopped"]


UNSENT: Mapping[str, Mapping[str, str]] = {
    "unsampled by the caller": {},
    "no sampling": {"OTEL_TRACES_SAMPLER": "always_off"},
    "an unknown exporter": {"OTEL_TRACES_EXPORTER": "zipkin"},
}
"""Why the router has no span, and its variables; `chassis/test_tracing.py` has all others."""


@pytest.mark.parametrize("why", UNSENT)
async def test_nothing_is_sent_of_what_is_not_sampled(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that still exports sends nothing either: the router decides."""
    received = Received()
    async with by_grpc(received) as collector:
        for name, value in {**collector.variables, "OTEL_BSP_SCHEDULE_DELAY": "1"}.items():
            monkeypatch.setenv(name, value)

        async def start(mesh: Mesh) -> None:
            await mesh.start_engine(*SIMULATED)
            await mesh.start_router(env={**INSIDE, **UNSENT[why]})
            await mesh.ready(1, 1)

        async with running_mesh(start=start) as mesh:
            caller = a_caller(sampled=False)
            given = traced_by(caller) if why.startswith("unsampled") else {}
            await mesh.client.complete([TEXT], max_tokens=3, **given)
            await mesh.router.stop()
            await mesh.engines[0].stop()
            warned = "no traces: " in mesh.router.stderr
    assert received.spans == []
    assert warned is why.startswith("an unknown")


async def test_attributes_of_the_process_are_those_of_the_variables(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are the headers, which like API keys appear in no span."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=staging")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-tenant={KEY}")
    received, caller = collector.received, a_caller()

    async def start(mesh: Mesh) -> None:
        await mesh.start_engine(*SIMULATED, env={"OTEL_SERVICE_NAME": "another"})
        await mesh.start_router(env=INSIDE)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        secret = ("authorization", f"Bearer {KEY}")
        given: dict[str, Any] = {"metadata": [secret, ("traceparent", str(caller))]}
        (result,) = await mesh.client.complete([TEXT], max_tokens=12, stop_texts=[TEXT], **given)
        await received.until(lambda: received.named("generate"))
        await whole(received, caller)
    assert received.resources.keys() == {"trtmesh-router", "another"}
    # That of the tokenizer inside, too.
    assert received.service_of(received.named("tokenize")[0]) == "trtmesh-router"
    for about in received.resources.values():
        assert about["deployment.environment"] == "staging"
        assert about["service.version"]
        assert about["service.instance.id"]
    assert all(each["x-tenant"] == KEY for each in received.headers)
    assert KEY.encode() not in received.raw
    assert TEXT.encode() not in received.raw
    assert result.text
    assert result.text.encode() not in received.raw


@contextmanager
def held_port() -> Iterator[int]:
    """A port that refuses connections until somebody else listens there, and that no other process gets."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_collector_that_comes_late_gets_what_is_new(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = Received()
    protocol = "grpc" if transport == "grpc" else "http/protobuf"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with held_port() as port:
        for name, value in endpoint(protocol, port).items():
            monkeypatch.setenv(name, value)
        await gets_what_is_new(received, transport, port)
    assert received.spans


async def gets_what_is_new(received: Received, transport: str, port: int) -> None:
    async with workers("mixed") as mesh:
        await mesh.client.complete([TEXT], max_tokens=3)

        async def dropped() -> bool:
            return (await scrape(mesh.router, reason="export")).get(DROPPED, 0.0) >= 6

        await eventually(dropped)
        async with TRANSPORTS[transport](received, port):
            caller = a_caller()

            async def comes() -> bool:
                await mesh.client.complete([TEXT], max_tokens=3, **traced_by(caller))
                return bool(received.of_trace(f"{caller.trace_id:032x}"))

            await eventually(comes)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_collector_that_never_answers_delays_nothing(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither tokens, nor the end of a process: both come although no export ever ends."""
    kept = list[asyncio.StreamWriter]()
    silent = await asyncio.start_server(lambda _, writer: kept.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    small = {"OTEL_BSP_MAX_QUEUE_SIZE": "12", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "4"}
    for name, value in {**endpoint(protocol, port), **small}.items():
        monkeypatch.setenv(name, value)
    # Longer than a test waits for the end of a process.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    async with silent, workers("mixed") as mesh:
        results = await mesh.client.complete([TEXT] * 8, max_tokens=3)
        assert not any(each.error for each in results)

        async def dropped() -> bool:
            counted = await scrape(mesh.router, reason="queue")
            return counted.get(DROPPED, 0.0) >= 8 * 5 + 1 - 12

        # The span of a call ends after its answer.
        await eventually(dropped)
        for process in (mesh.router, *mesh.engines, *mesh.tokenizers):
            assert await process.stop() == 0, process.stderr
            assert "Traceback" not in process.stderr
        for writer in kept:
            writer.close()
