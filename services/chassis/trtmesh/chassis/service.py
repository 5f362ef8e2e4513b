"""The life of a service process: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc
import uvloop
from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, ProcessCollector
from trtmesh.chassis.addresses import listen
from trtmesh.chassis.errors import STARTUP_ERROR_PREFIX, StartupError
from trtmesh.chassis.fair.messages import MessageAdmission
from trtmesh.chassis.grpc.compression_settings import CompressionSettings
from trtmesh.chassis.grpc.large_message import MessageLimits
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.grpc.server.server import Guard
from trtmesh.chassis.health import Health
from trtmesh.chassis.logs import set_up_logs
from trtmesh.chassis.metrics_endpoint import metrics_endpoint
from trtmesh.chassis.process_facts import allow_max_open_files, process_facts
from trtmesh.chassis.process_metrics import ProcessMetrics
from trtmesh.chassis.settings import load_settings
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.chassis.tls.certificates import HTTP_1_1, Certificates
from trtmesh.chassis.tls.client import H2
from trtmesh.chassis.tls.settings import SecuredSettings, TlsSettings
from trtmesh.chassis.tracing.spans import Tracer
from trtmesh.chassis.tracing.tracer import open_tracer
from trtmesh.v1 import process_pb2 as pb

log = logging.getLogger(__name__)

STOP_SECONDS = 3.0
"""Limit for releasing everything: a thread may be loading a model or be stuck in a device."""


class Service(Protocol):
    """The service of a process. Call order: `register`, `start`, `drain` (unless a step failed), `stop`."""

    service_names: Sequence[str]
    """Full names of the gRPC services, for health and reflection."""

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers, and binds additional addresses into `runtime.addresses`. Calls may arrive before `start`
        returns and must be refused."""

    async def start(self) -> None:
        """Loads everything needed to serve. Raises StartupError to end the process."""

    async def drain(self) -> None:
        """Stops admitting and returns when no work is in flight. Cancelled at the end of the grace period."""

    async def stop(self) -> None:
        """Ends remaining work and releases everything. Called exactly once, also after a failed bind or `start`."""


@dataclass
class Runtime:
    """Provided to a service by the chassis."""

    certificates: Certificates = field(default_factory=lambda: Certificates(TlsSettings(), ""))
    """TLS of the process; plain text unless given."""
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    health: Health = field(init=False)
    tracer: Tracer | None = None
    """None while nothing is traced."""
    more_metrics: Callable[[], str] = str
    """Additional metrics in Prometheus' text format; called in a thread."""
    descriptors: descriptor_pool.DescriptorPool = field(default_factory=descriptor_pool.Default)
    """Descriptors of the services, for reflection."""
    guard: Guard | None = None
    """Refuses calls on the port of the process."""
    compression: CompressionSettings | None = None
    """Of answers on the port of the process. None means uncompressed."""
    message_limits: MessageLimits | None = None
    """Of large messages there. None means trusted clients, services of the mesh."""
    admission: MessageAdmission = field(default_factory=MessageAdmission)
    """Of all messages there."""
    retire_connections: Callable[[], None] = lambda: None
    """Has clients of the port open their next calls on other connections, maybe of another process."""
    addresses: dict[str, str] = field(default_factory=dict)
    """Additional addresses, by the name for the announcement."""
    guarded: set[str] = field(default_factory=set)
    """Names of those `addresses` that only callers with a secret of their own may use."""
    process: pb.ProcessFacts = field(default_factory=pb.ProcessFacts)
    """The process; empty before it listens."""
    failure: asyncio.Future[BaseException] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def fail(self, error: BaseException) -> None:
        """Ends the process with a non-zero status. Called on the event loop's thread."""
        if not self.failure.done():
            self.failure.set_result(error)


S = TypeVar("S", bound=SecuredSettings)
Build = Callable[[S, Runtime], Service]


def run(settings_class: type[S], build: Build[S], argv: Sequence[str]) -> int:
    """Runs a service process until a signal. Returns the exit status."""
    spelling: Callable[[str], str] = str
    try:
        settings = load_settings(settings_class, argv)
        spelling = settings.spelling
        set_up_logs(settings.section, settings.log_level, settings.log_format)
        allow_max_open_files()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Process(settings, build).live())
    except StartupError as error:
        error.setting = spelling(error.setting)
        prefix = STARTUP_ERROR_PREFIX.format(section=settings_class.section)
        print(f"{prefix}{error}", file=sys.stderr)
        return error.exit_status


class _Process:
    """A process from bind to exit."""

    def __init__(self, settings: SecuredSettings, build: Build[Any]) -> None:
        self._settings = settings
        self._build = build
        self._stop_asked = asyncio.Event()

    async def live(self) -> int:
        self._listen_to_signals()
        certificates = Certificates(self._settings.tls, self._settings.section)
        runtime = Runtime(certificates)
        metrics = ProcessMetrics(self._settings.section, certificates)
        runtime.registry.register(metrics)
        ProcessCollector(registry=runtime.registry)
        tracer = open_tracer(self._settings.section, os.environ, runtime.registry)
        runtime.tracer = tracer
        service = self._build(self._settings, runtime)
        runtime.health = Health(service.service_names)
        server = GrpcServer(
            self._settings.max_message_bytes,
            runtime.guard,
            certificates.server(H2),
            self._settings.connections,
            runtime.compression,
            runtime.message_limits,
            runtime.admission,
        )
        runtime.retire_connections = server.retire_connections
        following = [asyncio.create_task(each.follow()) for each in (certificates, metrics)]
        for task in following:
            task.add_done_callback(partial(_fail_with, runtime))
        async with metrics_endpoint(
            runtime.registry,
            self._settings.host,
            self._settings.metrics_port,
            runtime.more_metrics,
            certificates.server(HTTP_1_1),
        ) as metrics_port:
            try:
                await self._bind(server, service, runtime, metrics_port)
                await self._start(service, runtime)
                return await self._serve(service, runtime)
            finally:
                await self._stop(service, runtime)
                await server.stop(grace=0.5)
                for task in following:
                    task.cancel()
                if tracer is not None:
                    await tracer.close()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_signal)
        loop.add_signal_handler(signal.SIGINT, self._on_ctrl_c)
        # Ignored under nohup, and stays so.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._on_foreign, number)
        if self._settings.stop_on_stdin_eof:
            loop.add_reader(sys.stdin.fileno(), self._on_stdin)

    def _on_signal(self) -> None:
        if self._stop_asked.is_set():
            log.warning("second signal: exiting now")
            os._exit(130)
        self._stop_asked.set()

    def _on_ctrl_c(self) -> None:
        if not self._stop_asked.is_set():
            log.warning(
                "stopping: work in flight has up to %g s to finish; a second Ctrl-C exits at once",
                self._settings.grace_seconds,
            )
        self._on_signal()

    def _on_hangup(self) -> None:
        """The terminal is gone, or somebody asks for a reload, though changed files are read again anyway. Terminal and
        shell may both send the signal, so a second does not exit."""
        if not self._stop_asked.is_set():
            log.warning("SIGHUP: stopping, as after SIGTERM")
            self._stop_asked.set()

    def _on_foreign(self, number: signal.Signals) -> None:
        """Without a handler, the signal would end the process and all streams."""
        log.info("%s means nothing to this process", number.name)

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            log.warning("the parent process ended: stopping")
            self._stop_asked.set()

    async def _bind(
        self, server: grpc.aio.Server, service: Service, runtime: Runtime, metrics_port: int | None
    ) -> None:
        await runtime.health.register(server)
        service.register(server)
        names = (*service.service_names, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, runtime.descriptors)
        settings = self._settings
        address = listen(server, settings.host, settings.port)
        await server.start()
        runtime.process = process_facts(
            settings,
            {"address": address, **runtime.addresses},
            runtime.guarded | ({"address", "http_address"} if runtime.guard else set()),
            metrics_port,
        )
        # The first line on standard output: tells the parent the port chosen for port 0.
        announcement = {
            "service": settings.section,
            "address": address,
            **runtime.addresses,
            "metrics_port": metrics_port,
            "pid": os.getpid(),
        }
        print(json.dumps(announcement), flush=True)
        log.info("listening on %s", address)

    async def _start(self, service: Service, runtime: Runtime) -> None:
        """Waits until the service is ready or a signal arrives."""
        await until_first_ends(
            service.start(), self._stop_asked.wait(), asyncio.shield(runtime.failure)
        )
        tune_garbage_collector()
        if not self._stop_asked.is_set() and not runtime.failure.done():
            await runtime.health.well("start")

    async def _serve(self, service: Service, runtime: Runtime) -> int:
        await until_first_ends(self._stop_asked.wait(), asyncio.shield(runtime.failure))
        if not runtime.failure.done():
            await self._drain(service, runtime)
        if not runtime.failure.done():
            return 0
        error = runtime.failure.result()
        log.critical("cannot continue: %s", error, exc_info=error)
        await runtime.health.unwell("failure", str(error))
        return 1

    async def _drain(self, service: Service, runtime: Runtime) -> None:
        """Lets in-flight work finish within the grace period, unless the process fails."""
        await runtime.health.unwell("drain", "draining")
        try:
            async with asyncio.timeout(self._settings.grace_seconds):
                await until_first_ends(service.drain(), asyncio.shield(runtime.failure))
        except TimeoutError:
            log.warning(
                "grace period of %g s ended: remaining work is cancelled",
                self._settings.grace_seconds,
            )

    async def _stop(self, service: Service, runtime: Runtime) -> None:
        """Releases everything. Exits the process after too long a time."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await service.stop()
        except TimeoutError:
            log.warning("exiting: the service did not stop within %g s", STOP_SECONDS)
            # A normal exit would wait for threads, or crash in daemon threads.
            os._exit(1 if runtime.failure.done() else 0)


def _fail_with(runtime: Runtime, task: asyncio.Task[Any]) -> None:
    """Ends the process together with a background task, since the end of the task is a defect."""
    if not task.cancelled() and (error := task.exception()) is not None:
        runtime.fail(error)


def tune_garbage_collector() -> None:
    """Freezes the objects of the start and bounds the pauses of collections.

    Streams create many short-lived objects and hardly any cycle, so collections find nothing, and their pauses grow
    with the surviving objects. With these thresholds the young generations pause for some 0.5 and 2 ms while thousands
    of calls open. The oldest is collected every twelve million objects, because errors in cycles would otherwise
    accumulate for days.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 2, 2_000)
