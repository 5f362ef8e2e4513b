"""An engine service in this process on a real socket, and the router's end of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from trtmesh.chassis.error_wire import REASON_METADATA_KEY
from trtmesh.chassis.grpc.client import ClientCall, Method, connected
from trtmesh.chassis.grpc.client.call import CallEnded
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.health import Health
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.chassis.service import Runtime
from trtmesh.engine.backend import Backend
from trtmesh.engine.gateways.choice import open_gateways
from trtmesh.engine.handoff.settings import HANDOFF_LIMITS
from trtmesh.engine.service.engine_service import EngineService
from trtmesh.engine.settings import EngineSettings
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

PATIENCE_SECONDS = 60.0
"""Upper bound of a wait; no test depends on the actual time."""

MESSAGE_BYTES = 64 * 2**20

CONNECT: Method[epb.EngineServiceConnectRequest, epb.EngineServiceConnectResponse] = Method(
    "/trtmesh.v1.EngineService/Connect",
    epb.EngineServiceConnectRequest.SerializeToString,
    epb.EngineServiceConnectResponse.FromString,
)


@dataclass
class RunningEngine:
    """An engine service and its address."""

    address: str
    service: EngineService
    runtime: Runtime
    stopped: bool = False

    async def stop(self) -> None:
        """Stops the service, once."""
        if not self.stopped:
            self.stopped = True
            await self.service.stop()


@asynccontextmanager
async def serving(backend: Backend, **settings: Any) -> AsyncIterator[RunningEngine]:
    """Serves `backend` inside the block, then stops as the chassis does. Transports that no setting names are those of
    one host: an agent of NIXL takes most of the CPU of a short test."""
    runtime, limits = Runtime(), settings.pop("handoff_limits", HANDOFF_LIMITS)
    defaults = {"backend": "simulated", "load_interval_seconds": 0.05}
    handoff = {"transports": ("shared_memory", "grpc")} | settings.pop("handoff", {})
    chosen = EngineSettings.model_validate(defaults | settings | {"handoff": handoff})
    service = EngineService(chosen, runtime, backend, limits)
    open_gateways(service, chosen)
    runtime.health = Health(service.service_names)
    server = GrpcServer(MESSAGE_BYTES, message_limits=runtime.message_limits)
    await runtime.health.register(server)
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine = RunningEngine(f"127.0.0.1:{port}", service, runtime)
    try:
        await service.start()
        await runtime.health.well("start")
        yield engine
    finally:
        await engine.stop()
        await server.stop(grace=0.5)


@dataclass
class Received:
    """The tokens and the end of one handle."""

    token_ids: list[int] = field(default_factory=list)
    first_offset: int | None = None
    end: epb.SequenceEnd | None = None


class RouterStream:
    """The router's end; checks the invariants of every step."""

    def __init__(
        self,
        call: ClientCall[epb.EngineServiceConnectRequest, epb.EngineServiceConnectResponse],
        *,
        acknowledging: bool,
    ) -> None:
        self.call = call
        self.acknowledging = acknowledging
        self.received: dict[int, Received] = {}
        self.steps: list[epb.Step] = []
        self.loads: list[epb.Load] = []
        self.kv_events: list[epb.KvEvents] = []
        self.adapter_states: list[epb.AdapterState] = []
        self.blocks_reserved: list[transfer.BlocksReserved] = []
        self.handoffs_offered: dict[int, transfer.HandoffDescriptor] = {}
        self.handoffs_failed: dict[str, pb.Error] = {}
        self.welcome: epb.Welcome | None = None

    async def send(self, *commands: epb.EngineCommand) -> None:
        try:
            await self.call.write(epb.EngineServiceConnectRequest(commands=commands))
        except CallEnded as error:
            raise StreamFailed(grpc.StatusCode.OK, error.message, "") from error
        except grpc.aio.AioRpcError as error:
            raise StreamFailed.of(error) from error

    async def acknowledge(self, received_steps: int | None = None) -> None:
        count = len(self.steps) if received_steps is None else received_steps
        await self.send(epb.EngineCommand(acknowledge=epb.AcknowledgeCommand(received_steps=count)))

    async def receive(self) -> bool:
        """Receives one message; False at the end. Raises AioRpcError if the stream failed."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                response = await self.call.read()
        except grpc.aio.AioRpcError as error:
            raise StreamFailed.of(error) from error
        if response is None:
            return False
        for event in response.events:
            self._take(event)
            if event.HasField("step") and self.acknowledging:
                # On an ended stream, another read raises its error.
                with suppress(StreamFailed):
                    await self.acknowledge()
        return True

    async def until(self, condition: Callable[[], object]) -> None:
        """Receives until `condition` holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():
                assert await self.receive(), "the stream ended early"

    async def ends(self, handles: Iterable[int]) -> dict[int, Received]:
        """Receives until all `handles` have ended; forgets and returns them."""
        names = list(handles)
        await self.until(lambda: all(h in self.received and self.received[h].end for h in names))
        return {handle: self.received.pop(handle) for handle in names}

    async def end(self, handle: int) -> Received:
        return (await self.ends([handle]))[handle]

    async def failure(self) -> StreamFailed:
        """Receives until the stream fails."""
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self.receive():
                    pass
        except StreamFailed as failure:
            return failure
        raise AssertionError("the stream ended well")

    def _take(self, event: epb.EngineEvent) -> None:
        match event.WhichOneof("event"):
            case "welcome":
                assert self.welcome is None
                self.welcome = event.welcome
            case "step":
                self._take_step(event.step)
            case "load":
                assert_leases_conserved(event.load)
                self.loads.append(event.load)
            case "kv_events":
                self.kv_events.append(event.kv_events)
            case "adapter_states":
                self.adapter_states += event.adapter_states.adapters
            case "blocks_reserved":
                self.blocks_reserved.append(event.blocks_reserved)
            case "handoff_offered":
                offered = event.handoff_offered
                assert offered.handle not in self.received or not self.received[offered.handle].end
                self.handoffs_offered[offered.handle] = offered.descriptor
            case "handoff_failed":
                failed = event.handoff_failed
                assert failed.lease_id not in self.handoffs_failed, "reported twice"
                self.handoffs_failed[failed.lease_id] = failed.error
            case other:
                raise AssertionError(other)

    def _take_step(self, step: epb.Step) -> None:
        assert len(set(step.handles)) == len(step.handles), "a handle occurs twice"
        assert sum(step.token_counts) == len(step.token_ids)
        if self.steps:
            assert step.step_count >= self.steps[-1].step_count
        self.steps.append(step)
        start = 0
        for handle, offset, count in zip(
            step.handles, step.token_offsets, step.token_counts, strict=True
        ):
            received = self.received.setdefault(handle, Received())
            assert received.end is None, "tokens after the end"
            if received.first_offset is None:
                received.first_offset = offset
            assert offset == received.first_offset + len(received.token_ids), "a gap or a repeat"
            received.token_ids += step.token_ids[start : start + count]
            start += count
        for end in step.ends:
            received = self.received.setdefault(end.handle, Received())
            assert received.end is None, "two ends"
            received.end = end


def assert_leases_conserved(load: epb.Load) -> None:
    for counts in (load.sent_handoffs, load.received_handoffs):
        ended = counts.consumed + counts.released + counts.expired
        assert counts.granted == ended + counts.held


class StreamFailed(Exception):
    """The worker ended the stream with an error."""

    def __init__(self, code: grpc.StatusCode, details: str, reason: str) -> None:
        super().__init__(f"{code.name} {reason}: {details}")
        self.code = code
        self.details = details
        self.reason = reason

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> StreamFailed:
        reason = dict(error.trailing_metadata()).get(REASON_METADATA_KEY, "")
        return cls(error.code(), error.details() or "", str(reason))


@asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[RouterStream]:
    """Opens a stream without a hello."""
    async with connected(address, MESSAGE_BYTES, PATIENCE_SECONDS) as connection:
        call = connection.open(CONNECT)
        stream = RouterStream(call, acknowledging=True)
        try:
            yield stream
        finally:
            call.cancel()


@asynccontextmanager
async def router_stream(
    address: str, *, credit: int = 2, acknowledging: bool = True, router: str = "test"
) -> AsyncIterator[RouterStream]:
    """Opens a stream with a hello and waits for the welcome; cancels it on exit."""
    async with raw_stream(address) as stream:
        stream.acknowledging = acknowledging
        await stream.send(hello(router=router, unacknowledged_steps=credit))
        await stream.until(lambda: stream.welcome)
        yield stream


def hello(**fields: Any) -> epb.EngineCommand:
    values: dict[str, Any] = {
        "router": "test",
        "schema_revision": SCHEMA_REVISION,
        "unacknowledged_steps": 2,
    }
    return epb.EngineCommand(hello=epb.HelloCommand(**values | fields))


def submit(
    handle: int,
    max_tokens: int | None = 8,
    *,
    prompt: Sequence[int] = (40, 41, 42),
    config: pb.GenerationConfig | None = None,
    **fields: Any,
) -> epb.EngineCommand:
    config = config or pb.GenerationConfig()
    if max_tokens is not None:
        config.stopping.max_tokens = max_tokens
    command = epb.SubmitCommand(
        handle=handle, request_id="r", token_ids=prompt, config=config, **fields
    )
    return epb.EngineCommand(submit=command)


def sampling(**fields: Any) -> pb.GenerationConfig:
    return pb.GenerationConfig(sampling=pb.SamplingConfig(**fields))


def stop(
    *handles: int, reason: pb.FinishReason.ValueType = pb.FINISH_REASON_STOPPED
) -> epb.EngineCommand:
    return epb.EngineCommand(stop=epb.StopCommand(handles=handles, reason=reason))


async def eventually(condition: Callable[[], object]) -> None:
    """Polls `condition` until it holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - nothing tells of what is waited for
            await asyncio.sleep(0.005)
