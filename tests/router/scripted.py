"""Scripted peers of a router, and a router in this process, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import grpc
from prometheus_client import CollectorRegistry
from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.fingerprint import ANY_TOKENIZER
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.health import Health
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.chassis.service import Runtime
from trtmesh.client import AdminClient, Client
from trtmesh.router.router import Router
from trtmesh.router.settings import RouterSettings
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import engine_pb2_grpc
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

PATIENCE_SECONDS = 120.0

REPORT_SECONDS = 0.1

MESSAGE_BYTES = 64 * 2**20

Context = grpc.aio.ServicerContext[Any, Any]


async def eventually(condition: Callable[[], object]) -> None:
    """Polls until `condition` holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - what is watched sets no event
            await asyncio.sleep(0.02)


class Mortal:
    """A scripted peer with one stream."""

    _context: Context | None = None
    _handler: asyncio.Task[Any] | None = None

    def _began(self, context: Context) -> None:
        """Registers this task as the stream's handler."""
        self._context, self._handler = context, asyncio.current_task()

    async def hang_up(self) -> None:
        """Breaks the stream like a dying process."""
        assert self._context
        assert self._handler
        with suppress(grpc.aio.AbortError):
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the process died")
        self._handler.cancel()


class ScriptedEngine(Mortal, engine_pb2_grpc.EngineServiceServicer):
    """A scripted worker."""

    def __init__(self, **description: Any) -> None:
        values: dict[str, Any] = {
            "worker": "scripted",
            "model": "m",
            "tokenizer_fingerprint": ANY_TOKENIZER,
            "schema_revision": SCHEMA_REVISION,
            "resumes_exactly": True,
        }
        self.description = epb.GetEngineResponse(**values | description)
        self.refusal = ""
        self.reporting = True
        self._last_load: dict[str, Any] = {}
        self.commands: list[epb.EngineCommand] = []
        self.hellos: list[epb.HelloCommand] = []
        self.submitted_at = 0.0
        self._writing = asyncio.Lock()
        self.contents: dict[tuple[int, str], bytes] = {}
        """Contents of adapters as far as they arrived."""
        self._sent: dict[int, int] = {}
        """Tokens of each sequence."""
        self.loads_adapters = True
        self.refused_versions: dict[str, TrtmeshError] = {}
        """Errors with which adapters are not loaded, by version."""

    @property
    def submits(self) -> list[epb.SubmitCommand]:
        return [c.submit for c in self.commands if c.HasField("submit")]

    @property
    def stops(self) -> list[tuple[int, int]]:
        """Stopped handles with their reasons."""
        stops = [c.stop for c in self.commands if c.HasField("stop")]
        return [(handle, stop.reason) for stop in stops for handle in stop.handles]

    async def submitted(self, count: int = 1) -> list[epb.SubmitCommand]:
        await eventually(lambda: len(self.submits) >= count)
        return self.submits

    async def GetEngine(self, request: Any, context: Context) -> epb.GetEngineResponse:
        return self.description

    # mypy-protobuf types generators only; grpc.aio also accepts a coroutine with writes.
    async def Connect(self, request_iterator: Any, context: Context) -> None:  # type: ignore[override]
        opening = await context.read()
        self.hellos.append(opening.commands[0].hello)
        if self.refusal:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        self._began(context)
        await self.send(epb.EngineEvent(welcome=epb.Welcome(engine=self.description)))
        reporting = asyncio.create_task(self._report_steadily())
        try:
            async for request in request_iterator:
                self.commands += request.commands
                for command in request.commands:
                    if command.HasField("load_adapter"):
                        await self._load(command.load_adapter)
                if any(command.HasField("submit") for command in request.commands):
                    self.submitted_at = asyncio.get_running_loop().time()
        finally:
            reporting.cancel()
            await asyncio.gather(reporting, return_exceptions=True)

    @property
    def loads(self) -> list[epb.LoadAdapterCommand]:
        return [c.load_adapter for c in self.commands if c.HasField("load_adapter")]

    @property
    def unloads(self) -> list[epb.UnloadAdapterCommand]:
        return [c.unload_adapter for c in self.commands if c.HasField("unload_adapter")]

    async def _load(self, part: epb.LoadAdapterCommand) -> None:
        key = part.adapter.id, part.adapter.version
        known = b"" if not part.offset else self.contents[key]
        assert len(known) == part.offset
        self.contents[key] = known + part.data
        whole = part.config_bytes + part.weights_bytes
        if len(self.contents[key]) < whole:
            return
        if (error := self.refused_versions.get(part.adapter.version)) is not None:
            await self.tell_adapter(*key, place=0, error=to_proto(error))
        elif self.loads_adapters:
            await self.tell_adapter(*key, name=part.adapter.name, pinned=part.pinned)

    async def tell_adapter(self, number: int, version: str, **state: Any) -> None:
        """Reports an adapter, in host memory unless `state` says otherwise."""
        values = {"place": epb.ADAPTER_PLACE_HOST} | state
        told = epb.AdapterState(id=number, version=version, **values)
        await self.send(epb.EngineEvent(adapter_states=epb.AdapterStates(adapters=[told])))

    async def _report_steadily(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            if self.reporting:
                await self.report()

    async def send(self, *events: epb.EngineEvent) -> None:
        assert self._context
        # A stream takes one write at a time.
        async with self._writing:
            await self._context.write(epb.EngineServiceConnectResponse(events=events))

    async def step(self, *parts: tuple[int, int, Sequence[int]], ends: Sequence[Any] = ()) -> None:
        """One step: (handle, offset, token ids) of each sequence, and (handle, reason) of each end."""
        step = epb.Step()
        for handle, offset, token_ids in parts:
            step.handles.append(handle)
            step.token_offsets.append(offset)
            step.token_counts.append(len(token_ids))
            step.token_ids.extend(token_ids)
        step.ends.extend(
            end
            if isinstance(end, epb.SequenceEnd)
            else epb.SequenceEnd(handle=end[0], reason=end[1])
            for end in ends
        )
        self._count(step)
        await self.send(epb.EngineEvent(step=step))

    def _count(self, step: epb.Step) -> None:
        """Fills in the tokens of ended sequences, unless a test says how many there are."""
        for handle, offset, count in zip(
            step.handles, step.token_offsets, step.token_counts, strict=True
        ):
            self._sent[handle] = offset + count
        for end in step.ends:
            before = (s.emitted_tokens for s in self.submits[::-1] if s.handle <= end.handle)
            sent = self._sent.pop(end.handle, None)
            end.generated_tokens = end.generated_tokens or (
                next(before, 0) if sent is None else sent
            )

    async def report(self, **load: Any) -> None:
        """Reports the load, now and at the interval."""
        self._last_load |= load
        await self.send(epb.EngineEvent(load=epb.Load(**self._last_load)))


@asynccontextmanager
async def serving(add: Callable[[Any, grpc.aio.Server], None], peer: Any) -> AsyncIterator[str]:
    """Serves a scripted peer; yields its address."""
    server = GrpcServer(MESSAGE_BYTES)
    add(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)


def serving_engine(engine: ScriptedEngine) -> Any:
    return serving(engine_pb2_grpc.add_EngineServiceServicer_to_server, engine)


class RouterClient(Client):
    """A client, an admin client and the metrics of a router."""

    admin: AdminClient
    router: Router
    registry: CollectorRegistry
    http_address: str

    def gauge(self, name: str, **labels: str) -> float:
        """The value of one of the router's gauges or counters."""
        value = self.registry.get_sample_value(f"trtmesh_router_{name}", labels)
        assert value is not None, f"the router has no {name}"
        return value

    async def status(self) -> admin_pb.ListWorkersResponse:
        return await self.admin.list_workers()


def merged(defaults: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, completed with defaults in each group."""
    groups = {name: {**group, **settings.get(name, {})} for name, group in defaults.items()}
    return {**settings, **groups}


@asynccontextmanager
async def serving_router(
    engines: Sequence[str], tokenizers: Sequence[str] = (), **settings: Any
) -> AsyncIterator[RouterClient]:
    """Runs a router in this process; yields a client."""
    runtime = Runtime()
    own = {"admin": {"port": 0}, "http": {"port": None}}
    settings = {"engines": tuple(engines), "tokenizers": tuple(tokenizers)} | merged(own, settings)
    router = Router(RouterSettings.model_validate(settings), runtime)
    runtime.health = Health(router.service_names)
    server = GrpcServer(
        MESSAGE_BYTES,
        runtime.guard,
        message_limits=runtime.message_limits,
        admission=runtime.admission,
    )
    await runtime.health.register(server)
    router.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        await router.start()
        async with (
            RouterClient(f"127.0.0.1:{port}") as client,
            AdminClient(runtime.addresses["admin_address"]) as client.admin,
        ):
            client.router = router
            client.registry = runtime.registry
            client.http_address = runtime.addresses.get("http_address", "")
            yield client
    finally:
        await router.stop()
        await server.stop(grace=0.5)


State: TypeAlias = admin_pb.WorkerState.ValueType


async def states(client: RouterClient) -> tuple[list[State], list[State]]:
    """Sorted states of workers and tokenizers: ports, and so the order, differ between runs."""
    status = await client.status()
    return sorted(w.state for w in status.workers), sorted(t.state for t in status.tokenizers)


async def until_states(
    client: RouterClient, workers: Sequence[State], tokenizers: Sequence[State]
) -> None:
    wanted, seen = (sorted(workers), sorted(tokenizers)), await states(client)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while seen != wanted:
                await asyncio.sleep(0.01)
                seen = await states(client)
    except TimeoutError:
        raise AssertionError(f"{wanted} were wanted but the last states are {seen}") from None


LENGTH = pb.FINISH_REASON_LENGTH
READY = admin_pb.WORKER_STATE_READY
REFUSED = admin_pb.WORKER_STATE_REFUSED
