"""API keys at every door of real processes, and whose requests a caller may stop, resume and see."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil
import pytest
import pytest_asyncio
from e2e.mesh import (
    ENDLESS,
    LASTING,
    PATIENT,
    Mesh,
    StreamReader,
    eventually,
    running_mesh,
    scrape,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from processes import ServiceProcess
from trtmesh.chassis.errors import RateLimited, Unauthenticated
from trtmesh.client import Accepted, AdminClient, Client, Tokens
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.callers.key_file import ListedKey, digest_of
from trtmesh.v1 import router_pb2, router_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

ALICE, BOB, LATE, SLOW = "key-of-alice-1f", "key-of-bob-2e", "key-of-late-3d", "key-of-slow-4c"
REVOKED = "key-of-revoked-5b"
SECRETS = (ALICE, BOB, LATE, SLOW, REVOKED)
PLATFORMS = {
    "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "ensemble",
    "AIP_PREDICT_ROUTE": "/predict",
    "AIP_HEALTH_ROUTE": "/health",
}
INFERENCE = "/inference.GRPCInferenceService/"
ENSEMBLE = "/v2/models/ensemble"


def line(name: str, key: str, limits: Mapping[str, str] | None = None, **more: Any) -> str:
    return f"{ListedKey(name, digest_of(key), limits or {}, **more)}\n"


LINES = (
    line("alice", ALICE)
    + line("bob", BOB)
    + line("late", LATE, expires=datetime.now(UTC) - timedelta(seconds=1))
    + line("slow", SLOW, {"items_per_second": "0.001", "burst_items": "1"})
)


@dataclass
class Keyed:
    """Two routers of one fleet with one file of keys."""

    mesh: Mesh
    second: ServiceProcess
    admin: AdminClient
    """Of the first router."""
    file: Path

    @property
    def address(self) -> str:
        return self.mesh.router.address

    @property
    def processes(self) -> list[ServiceProcess]:
        return [self.mesh.router, self.second, *self.mesh.engines, *self.mesh.tokenizers]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Keyed]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(LINES)
    flags: Sequence[str] = (*PATIENT, "--api-keys-file", str(file), "--log-level", "debug")
    flags = (*flags, "--http-vertex-ai-model", "ensemble")

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(mesh.start_tokenizer(), mesh.start_engine(*LASTING))
        await mesh.start_router(*flags, env=PLATFORMS)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        first, admin = mesh.router, mesh.admin
        await mesh.start_router(*flags, env=PLATFORMS)
        await mesh.ready(1, 1)
        second, mesh.router = mesh.router, first
        yield Keyed(mesh, second, admin, file)


Door = Callable[[Keyed, str | None], Awaitable[None]]
"""Calls with an API key, or without."""


def metadata_of(key: str | None) -> tuple[tuple[str, str], ...]:
    return () if key is None else (("authorization", f"Bearer {key}"),)


async def native(keyed: Keyed, key: str | None) -> None:
    async with Client(keyed.address, api_key=key) as client:
        (item,) = await client.complete(["x"], max_tokens=2)
        assert item.usage.generated_tokens == 2


async def stop(keyed: Keyed, key: str | None) -> None:
    async with Client(keyed.address, api_key=key) as client:
        assert await client.stop("unknown") == 0


async def resume(keyed: Keyed, key: str | None) -> None:
    request = router_pb2.GenerateRequest(request_id="resumed")
    request.items.add().prompt.text = "x"
    request.config.stopping.max_tokens = 1
    async with grpc.aio.insecure_channel(keyed.address) as channel:
        stub = router_pb2_grpc.MeshServiceStub(channel)
        call = stub.Resume(router_pb2.ResumeRequest(request=request), metadata=metadata_of(key))
        assert [response async for response in call]


def infer_request(name: str = "", tokens: int = 2, **more: Any) -> Any:
    """A ModelInferRequest to the ensemble."""
    request = kserve.ModelInferRequest(model_name="ensemble", id=name)
    values: dict[str, tuple[str, Any]] = {
        "text_input": ("BYTES", b"x"),
        "max_tokens": ("INT32", tokens),
        **more,
    }
    for tensor, (kind, value) in values.items():
        given = request.inputs.add(name=tensor, datatype=kind, shape=[1, 1])
        fields = {"BYTES": "bytes_contents", "INT32": "int_contents", "BOOL": "bool_contents"}
        getattr(given.contents, fields[kind]).append(value)
    return request


async def stream_infer(keyed: Keyed, key: str | None) -> None:
    async with grpc.aio.insecure_channel(keyed.address) as channel:
        call = inference(channel)(iter([infer_request()]), metadata=metadata_of(key))
        responses = [response async for response in call]
        assert responses
        if problem := responses[0].error_message:
            raise RateLimited(problem)


async def infer(keyed: Keyed, key: str | None) -> None:
    async with grpc.aio.insecure_channel(keyed.address) as channel:
        call: Any = channel.unary_unary(
            f"{INFERENCE}ModelInfer",
            request_serializer=kserve.ModelInferRequest.SerializeToString,
        )
        assert await call(infer_request(), metadata=metadata_of(key))


def inference(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream(
        f"{INFERENCE}ModelStreamInfer",
        request_serializer=kserve.ModelInferRequest.SerializeToString,
        response_deserializer=kserve.ModelStreamInferResponse.FromString,
    )


def unary(method: str) -> Door:
    """A Triton method with an empty request."""

    async def call(keyed: Keyed, key: str | None) -> None:
        async with grpc.aio.insecure_channel(keyed.address) as channel:
            call: Any = channel.unary_unary(method)
            await call(b"", metadata=metadata_of(key))

    return call


async def reflection(keyed: Keyed, key: str | None) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    async with grpc.aio.insecure_channel(keyed.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([asked]), metadata=metadata_of(key))
        answers = [answer async for answer in call]
        assert answers[0].list_services_response.service


def http(path: str, body: Any = None) -> Door:
    async def call(keyed: Keyed, key: str | None) -> None:
        await asyncio.to_thread(fetch, keyed.mesh.router.http_address, path, body, key)

    return call


def fetch(address: str, path: str, body: Any, key: str | None) -> bytes:
    """Raises what a gRPC call would."""
    data = None if body is None else json.dumps(body).encode()
    headers = {} if key is None else {"X-API-Key": key}
    request = urllib.request.Request(f"http://{address}{path}", data, headers)
    try:
        with urllib.request.urlopen(request) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        told = error.read().decode()
        if error.code == 401 and error.headers["WWW-Authenticate"] == "Bearer":
            raise Unauthenticated(told) from None
        if error.code == 429 and error.headers["Retry-After"]:
            raise RateLimited(told) from None
        raise


PROMPT = {"text_input": "x", "max_tokens": 2}
HELLO = [{"role": "user", "content": "x"}]
TENSORS = {
    "inputs": [
        {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["x"]},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [2]},
    ]
}
DOORS: Mapping[str, Door] = {
    "Generate": native,
    "Stop": stop,
    "Resume": resume,
    "reflection": reflection,
    "ModelStreamInfer": stream_infer,
    "ModelInfer": infer,
    **{
        method: unary(f"{INFERENCE}{method}")
        for method in ("ServerMetadata", "ModelStatistics", "RepositoryIndex", "LogSettings")
    },
    "HTTP generate": http(f"{ENSEMBLE}/generate", PROMPT),
    "HTTP generate_stream": http(f"{ENSEMBLE}/generate_stream", PROMPT),
    "HTTP infer": http(f"{ENSEMBLE}/infer", TENSORS),
    "SageMaker": http("/invocations", TENSORS),
    "Vertex AI": http("/predict", TENSORS),
    **{
        f"HTTP {path}": http(path)
        for path in ("/v2", ENSEMBLE, f"{ENSEMBLE}/config", "/v2/models/stats", "/v2/logging")
    },
    "OpenAI models": http("/v1/models"),
    "OpenAI completions": http("/v1/completions", {"prompt": "x", "max_tokens": 2}),
    "OpenAI chat": http("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    "OpenAI tokenize": http("/tokenize", {"prompt": "x"}),
    "HTTP repository": http("/v2/repository/index", {}),
}
GENERATING = (
    *("Generate", "Resume", "ModelStreamInfer", "ModelInfer"),
    *("HTTP generate", "HTTP generate_stream", "HTTP infer", "SageMaker", "Vertex AI"),
    *("OpenAI completions", "OpenAI chat"),
)
UNKNOWN: Mapping[str, Door] = {
    "unknown method": unary("/trtmesh.v1.MeshService/NoSuchMethod"),
    "unknown path": http("/no/such/path"),
    "unknown OpenAI path": http("/v1/no/such/path"),
}


async def refused(door: Door, keyed: Keyed, key: str | None) -> str:
    """Calls with a key that must be refused as unauthenticated; returns the error."""
    with pytest.raises((Unauthenticated, grpc.aio.AioRpcError)) as failed:
        await door(keyed, key)
    error = failed.value
    if isinstance(error, grpc.aio.AioRpcError):
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        return error.details() or ""
    return str(error)


@pytest.mark.parametrize("door", DOORS)
async def test_good_key_opens_every_door(keyed: Keyed, door: str) -> None:
    await DOORS[door](keyed, ALICE)


@pytest.mark.parametrize("door", [*DOORS, *UNKNOWN])
async def test_door_is_closed_without_a_valid_key(keyed: Keyed, door: str) -> None:
    call = {**DOORS, **UNKNOWN}[door]
    assert "no API key" in await refused(call, keyed, None)
    assert "not known" in await refused(call, keyed, f"{ALICE}x")
    assert "expired at" in await refused(call, keyed, LATE)


async def test_call_with_two_keys_is_refused(keyed: Keyed) -> None:
    """At both doors, whichever comes first."""
    for keys in ((ALICE, BOB), (BOB, ALICE)):
        async with grpc.aio.insecure_channel(keyed.address) as channel:
            call: Any = channel.unary_unary(f"{INFERENCE}ServerMetadata")
            with pytest.raises(grpc.aio.AioRpcError, match="several API keys") as failed:
                await call(b"", metadata=[pair for key in keys for pair in metadata_of(key)])
            assert failed.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with (
            aiohttp.ClientSession() as client,
            client.get(
                f"http://{keyed.mesh.router.http_address}/v2",
                headers=[("x-api-key", key) for key in keys],
            ) as response,
        ):
            assert response.status == 401
            assert "several API keys" in await response.text()


async def test_health_is_open(keyed: Keyed) -> None:
    async with grpc.aio.insecure_channel(keyed.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for method in ("ServerLive", "ServerReady", "ModelReady"):
            await unary(f"{INFERENCE}{method}")(keyed, None)
    for path in ("/v2/health/live", "/v2/health/ready", f"{ENSEMBLE}/ready"):
        await http(path)(keyed, None)


@pytest.mark.parametrize("door", GENERATING)
async def test_key_over_its_limit_is_told_when_to_retry(keyed: Keyed, door: str) -> None:
    """A burst of one item: some door before or this one used it up."""
    with suppress(RateLimited, grpc.aio.AioRpcError):
        await DOORS[door](keyed, SLOW)
    with pytest.raises((RateLimited, grpc.aio.AioRpcError)) as late:
        await DOORS[door](keyed, SLOW)
    error = late.value
    if isinstance(error, grpc.aio.AioRpcError):
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata() or ())["trtmesh-retry-after-ms"]) > 0
    else:
        assert "slow used up its 0.001 items a second" in str(error)


async def test_revoked_key_opens_no_door_and_running_streams_go_on(keyed: Keyed) -> None:
    keyed.file.write_text(LINES + line("revoked", REVOKED))
    await eventually(lambda: known_by(keyed, REVOKED, 2))
    async with (
        Client(keyed.address, api_key=REVOKED) as client,
        Client(keyed.address, api_key=ALICE) as alice,
        grpc.aio.insecure_channel(keyed.address) as channel,
    ):
        triton = inference(channel)(metadata=metadata_of(REVOKED))
        await triton.write(infer_request("before"))
        assert not (await triton.read()).error_message
        other = StreamReader(alice, ["y"] * 2, max_tokens=ENDLESS)
        events = client.generate(["x"], request_id="goes on", max_tokens=ENDLESS)
        async with aclosing(events):
            while not isinstance(await anext(events), Tokens):
                pass
            keyed.file.write_text(LINES)

            await eventually(lambda: known_by(keyed, REVOKED, 0))
            for door in DOORS.values():
                assert "not known" in await refused(door, keyed, REVOKED)
            (live,) = (await keyed.admin.list_requests("goes on")).requests
            known = live.items[0].generated_tokens
            async for event in events:
                if isinstance(event, Tokens) and event.token_offset > known:
                    break
            else:
                pytest.fail("the stream ended with its key")
        await triton.write(infer_request("after"))
        while not (answer := await triton.read()).error_message:
            assert answer.infer_response.id == "before"
        assert "not known" in answer.error_message
        await triton.done_writing()
        await other.stopped_at(max(map(other.tokens, range(2))) + 1)


async def known_by(keyed: Keyed, key: str, routers: int) -> bool:
    """Whether so many routers know the key."""
    known = 0
    for address in (keyed.address, keyed.second.address):
        async with Client(address, api_key=key) as client:
            with suppress(Unauthenticated):
                await client.stop("unknown")
                known += 1
    return known == routers


async def test_stranger_finds_no_request(keyed: Keyed) -> None:
    """On both routers, bob learns as much of alice's id as of an unknown one, and may use it."""
    addresses = [keyed.address, keyed.second.address]
    async with (
        Client(addresses, api_key=ALICE) as alice,
        Client(addresses, api_key=BOB) as bob,
    ):
        events = alice.generate(["x"], request_id="hers", max_tokens=ENDLESS)
        async with aclosing(events):
            assert isinstance(await anext(events), Accepted)
            assert await bob.stop("hers") == await bob.stop("nobody's") == 0
            (item,) = await bob.complete(["y"], request_id="hers", max_tokens=3)
            assert item.usage.generated_tokens == 3
            (live,) = (await keyed.admin.list_requests("hers")).requests
            assert live.owner == "alice"
            assert await alice.stop("hers") == 1
            assert [event async for event in events]


async def test_stranger_stops_no_request_of_triton(keyed: Keyed) -> None:
    stop = infer_request("hers", stop=("BOOL", True))
    async with grpc.aio.insecure_channel(keyed.address) as channel:
        running = inference(channel)(metadata=metadata_of(ALICE))
        await running.write(infer_request("hers", tokens=ENDLESS))
        await eventually(lambda: live_here(keyed, 1))
        for key in (BOB, ALICE):
            call = inference(channel)(iter([stop]), metadata=metadata_of(key))
            assert not [answer.error_message async for answer in call if answer.error_message]
            if key == BOB:
                assert await live_here(keyed, 1)
        await eventually(lambda: live_here(keyed, 0))
        await running.done_writing()


async def live_here(keyed: Keyed, count: int) -> bool:
    return (await scrape(keyed.mesh.router))["trtmesh_router_live_requests"] == count


async def test_no_output_has_a_key(keyed: Keyed) -> None:
    """The last test: logs, metrics and command lines of all processes after all calls."""
    for process in keyed.processes:
        told = process.stderr
        if process.metrics_port:
            told += await asyncio.to_thread(
                fetch_text, f"http://127.0.0.1:{process.metrics_port}/metrics"
            )
        told += " ".join(psutil.Process(process.pid).cmdline())
        assert not [secret for secret in SECRETS if secret in told]
        assert not [secret for secret in SECRETS if digest_of(secret).hex() in told]
    assert " slow/" in keyed.mesh.router.stderr
    metrics = await scrape(keyed.mesh.router, caller="slow")
    assert metrics["trtmesh_router_requests_refused_total"] > 0


def fetch_text(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read(), "utf-8")
