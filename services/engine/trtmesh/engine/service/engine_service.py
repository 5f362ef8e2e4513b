"""The engine service: life cycle of a backend and of the routers' streams, and liveness as progress of steps."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import grpc
from trtmesh.chassis.errors import (
    Draining,
    SettingsError,
    TrtmeshError,
    Unavailable,
    UnsupportedCall,
    WorkerLost,
)
from trtmesh.chassis.rpc import RpcContext, ServedContext
from trtmesh.chassis.service import Runtime
from trtmesh.chassis.tasks import next_tick
from trtmesh.engine.backend import (
    Backend,
    BackendInfo,
    BackendStats,
    HandsOverBlocks,
    HandsOverStates,
    HoldsAdapters,
    StateKind,
)
from trtmesh.engine.handoff.copying import copying_of
from trtmesh.engine.handoff.fetch_server import FetchServer
from trtmesh.engine.handoff.handoffs import HandoffsByBlocks, HandoffsByState
from trtmesh.engine.handoff.own_kv import OwnKv, OwnStates, kind_of
from trtmesh.engine.handoff.settings import HANDOFF_LIMITS, HandoffLimits
from trtmesh.engine.handoff.transports.choice import KNOWN, open_transports
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.engine.service.adapter_delivery import DeliveryMemory
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.engine.service.router_session import serve_stream
from trtmesh.engine.service.streams import LoadedEngine, Streams
from trtmesh.engine.service.wire import describe, role_of
from trtmesh.engine.settings import EngineSettings
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import engine_pb2_grpc, kv_transfer_pb2_grpc

log = logging.getLogger(__name__)


STEP_GAP_SECONDS = 10.0
"""Time without a step while sequences wait for one; afterwards the worker's health is NOT_SERVING. Routers leave it
earlier, by what they learned of its steps."""


class Progress:
    """Judges a series of stats; times are seconds of one monotonic clock."""

    def __init__(self, step_gap_seconds: float) -> None:
        self._step_gap_seconds = step_gap_seconds
        self._step_count = -1
        self._since: float | None = None

    def problem(self, stats: BackendStats, now: float) -> str | None:
        """Describes a stall; None while steps continue or no sequence waits."""
        waiting = stats.running_sequences + stats.waiting_sequences
        if not waiting or stats.step_count != self._step_count or self._since is None:
            self._step_count = stats.step_count
            self._since = now
            return None
        if now - self._since < self._step_gap_seconds:
            return None
        # The text stays the same during a stall and is reported once.
        return (
            f"{self._step_gap_seconds:g} s without a step after number {stats.step_count}"
            " though sequences wait for one"
        )


HANDOFF_THREADS = 2

ALL_ROLES = (epb.WORKER_ROLE_MIXED, epb.WORKER_ROLE_PREFILL, epb.WORKER_ROLE_DECODE)

FAREWELL_SECONDS = 1.0
"""Time for streams to send waiting events at shutdown."""

Sessions = set[asyncio.Task[None]]
"""The tasks of open streams; they are cancelled at shutdown."""


class Gateway(Protocol):
    """Another contract on the port of the service."""

    service_name: str

    def register(self, server: grpc.aio.Server) -> None: ...

    async def load(self, model_dir: Path | None) -> None:
        """Called once the model is loaded."""


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Implements chassis.service.Service and EngineService around one backend."""

    def __init__(
        self,
        settings: EngineSettings,
        runtime: Runtime,
        backend: Backend,
        handoff_limits: HandoffLimits = HANDOFF_LIMITS,
    ) -> None:
        self._handoff_limits = handoff_limits
        self.service_names: Sequence[str] = (
            "trtmesh.v1.EngineService",
            "trtmesh.v1.KvTransferService",
        )
        self.metrics = EngineMetrics()
        runtime.registry.register(self.metrics)
        self._settings = settings
        self._runtime = runtime
        self._backend = backend
        self._loop = asyncio.get_running_loop()
        self._streams = Streams(self.metrics)
        self._progress = Progress(STEP_GAP_SECONDS)
        self._engine: LoadedEngine | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._sessions: Sessions = set()
        self._broken = False
        self._gateway: Gateway | None = None

    def add_gateway(
        self, build: Callable[[Callable[[], LoadedEngine], Runtime, Sessions], Gateway]
    ) -> None:
        """Serves another contract; the engine given to `build` raises Unavailable before the model is loaded."""
        self._gateway = build(self._loaded, self._runtime, self._sessions)
        self.service_names = (*self.service_names, self._gateway.service_name)

    def register(self, server: grpc.aio.Server) -> None:
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, server)
        fetches = FetchServer(self._handoffs)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(fetches, server)
        if self._gateway:
            self._gateway.register(server)

    async def start(self) -> None:
        await self._runtime.health.unwell("model", "loading")
        info = await self._backend.start(self._streams.deliver, self._on_failure)
        if self._gateway:
            await self._gateway.load(self._settings.model_dir)
        backend = self._backend
        by_state = backend if info.state_kind and isinstance(backend, HandsOverStates) else None
        by_blocks = backend if not by_state and isinstance(backend, HandsOverBlocks) else None
        memory = by_blocks.kv_memory() if by_blocks else None
        if memory or by_state:
            info = _with_handoffs(info)
        role = role_of(self._settings, info)
        if role not in info.capabilities.roles:
            raise SettingsError(
                f"is {self._settings.role} but the {info.backend} backend does not support this role",
                setting="engine.role",
            )
        # The default is the directory's name, as in the tokenizer.
        directory = self._settings.model_dir.resolve().name if self._settings.model_dir else ""
        info = replace(info, model=self._settings.model or directory or info.model)
        # The suffix tells a restarted worker of the same process id from its predecessor.
        name = (
            self._settings.worker or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        )
        handoffs: HandoffsByBlocks | HandoffsByState | None = None
        if by_state and info.state_kind:
            handoffs = self._by_state(by_state, info, name, info.state_kind)
        elif by_blocks and memory:
            handoffs = self._by_blocks(by_blocks, info, name, memory)
        description = describe(info, name, self._settings, handoffs.own if handoffs else None)
        description.process.CopyFrom(self._runtime.process)
        self._engine = LoadedEngine(
            name=name,
            settings=self._settings,
            backend=backend,
            adapters=backend if isinstance(backend, HoldsAdapters) else None,
            info=info,
            description=description,
            streams=self._streams,
            metrics=self.metrics,
            delivery_memory=DeliveryMemory(info.max_adapter_bytes),
            handoffs=handoffs,
            role=role,
            tracer=self._runtime.tracer,
        )
        self._ticker = asyncio.create_task(self._tick())
        await self._runtime.health.well("model")
        log.info("worker %s serves model %s with the %s backend", name, info.model, info.backend)

    async def drain(self) -> None:
        if self._engine:
            self._engine.drain(self._settings.grace_seconds)
            self._streams.tell_load(self._engine.load())
            await self._streams.quiet()

    async def stop(self) -> None:
        if self._ticker:
            self._ticker.cancel()
            with suppress(asyncio.CancelledError):
                await self._ticker
        if self._engine:
            self._engine.drain(0.0)
            farewell = Draining(f"worker {self._engine.name} stops; use another worker")
            for stream in self._streams:
                stream.finish(farewell)
            if self._sessions:
                await asyncio.wait(self._sessions, timeout=FAREWELL_SECONDS)
            if self._engine.handoffs:
                await self._engine.handoffs.close()
        await self._backend.close()

    async def GetEngine(
        self, request: epb.GetEngineRequest, context: RpcContext
    ) -> epb.GetEngineResponse:
        return self._loaded().description

    # Not a generator, unlike the stub: a cancelled generator leaves cleanup to the garbage collector.
    async def Connect(  # type: ignore[override]
        self, request_iterator: object, context: ServedContext
    ) -> None:
        session = asyncio.current_task()
        assert session is not None
        self._sessions.add(session)
        try:
            await serve_stream(self._loaded, context)
        except TrtmeshError as error:
            self.metrics.errors[error.reason] += 1
            raise
        finally:
            self._sessions.discard(session)

    def _by_blocks(
        self, backend: HandsOverBlocks, info: BackendInfo, name: str, memory: KvMemory
    ) -> HandoffsByBlocks:
        settings = self._settings
        threads = ThreadPoolExecutor(HANDOFF_THREADS, "handoff")
        own = OwnKv(
            worker=name,
            settings=settings.handoff,
            backend=backend,
            memory=memory,
            kind=kind_of(memory, info),
            total_blocks=info.total_blocks,
            layers_per_part=info.layers_per_part,
            transports=open_transports(settings.handoff, memory, KNOWN),
            threads=threads,
            copying=copying_of(memory, threads),
            max_message_bytes=settings.max_message_bytes,
            is_draining=lambda: self._engine is None or self._engine.draining,
            tls_of_peers=lambda: self._runtime.certificates.peers,
            limits=self._handoff_limits,
        )
        handoffs = HandoffsByBlocks(own, self.metrics.handoffs)
        self._streams.take_handoff = handoffs.take
        return handoffs

    def _by_state(
        self, backend: HandsOverStates, info: BackendInfo, name: str, kind: StateKind
    ) -> HandoffsByState:
        own = OwnStates(
            worker=name,
            backend=backend,
            kind=kind,
            model_fingerprint=info.model_fingerprint,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            max_message_bytes=self._settings.max_message_bytes,
            limits=self._handoff_limits,
        )
        return HandoffsByState(own, self.metrics.handoffs)

    def _handoffs(self) -> HandoffsByBlocks:
        handoffs = self._loaded().handoffs
        if not isinstance(handoffs, HandoffsByBlocks):
            raise UnsupportedCall("this worker hands no blocks over")
        return handoffs

    def _loaded(self) -> LoadedEngine:
        if self._engine is None:
            raise Unavailable("the model is not loaded yet", retry_after_ms=1000)
        return self._engine

    async def _tick(self) -> None:
        """Reports load and progress at a steady pace."""
        try:
            while True:
                stats = self._backend.stats()
                self._tell(stats)
                if self._engine and self._engine.handoffs and stats.lacks_blocks:
                    self._engine.handoffs.relieve()
                problem = self._progress.problem(stats, time.monotonic())
                if problem:
                    await self._runtime.health.unwell("progress", problem)
                else:
                    await self._runtime.health.well("progress")
                await next_tick(self._settings.load_interval_seconds)
        except Exception as error:  # noqa: BLE001
            # Broad on purpose: without this task a working worker would look dead.
            self._fail(error)

    def _tell(self, stats: BackendStats) -> None:
        engine = self._loaded()
        load = engine.load(stats)
        self.metrics.stats = stats
        self.metrics.told_busy_seconds = load.busy_seconds
        self.metrics.handoffs.told(load)
        self._streams.tell_load(load)
        unacknowledged = (stream.unacknowledged_steps for stream in self._streams)
        self.metrics.unacknowledged_steps = sum(unacknowledged)

    def _on_failure(self, error: BaseException) -> None:
        """Callback of the backend, on any thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """Ends everything with WorkerLost and exits, because the backend broke."""
        if self._broken:
            return
        self._broken = True
        if self._engine:
            self._engine.drain(0.0)
            lost = WorkerLost(f"the backend of worker {self._engine.name} broke: {error}")
            for stream in self._streams:
                stream.fail(lost)
        self._runtime.fail(error)


def _with_handoffs(info: BackendInfo) -> BackendInfo:
    """Adds what every backend with handoffs supports."""
    return replace(
        info,
        capabilities=replace(info.capabilities, roles=ALL_ROLES),
        supported_fields=info.supported_fields | {"handoff.phase"},
    )
