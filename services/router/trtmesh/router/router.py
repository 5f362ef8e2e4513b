"""The router process: builds everything once and runs the background tasks."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial

import grpc
from trtmesh.chassis.addresses import Address, ForeignAddress, is_foreign, parse_engine
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.connecting import check_address
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.fair.messages import MessageAdmission
from trtmesh.chassis.grpc.large_message import MessageLimits
from trtmesh.chassis.reflection import reflection_pool
from trtmesh.chassis.service import Runtime
from trtmesh.chassis.tasks import next_tick
from trtmesh.chassis.tls.certificates import HTTP_1_1
from trtmesh.chassis.tls.client import H2, plain_text
from trtmesh.kserve import grpc_service_pb2
from trtmesh.router.adapters.adapters import Adapters
from trtmesh.router.adapters.following import Followed
from trtmesh.router.admission import Admission, RateLimiter
from trtmesh.router.callers.callers import Callers
from trtmesh.router.canary.canary import Canary
from trtmesh.router.doors.admin.console import Console
from trtmesh.router.doors.admin.door import AdminDoor
from trtmesh.router.doors.admin.service import RouterAdminService
from trtmesh.router.doors.guard import CallerGuard
from trtmesh.router.doors.http.authorising import Handler
from trtmesh.router.doors.http.load_header import LoadHeader
from trtmesh.router.doors.http.port import HttpPort
from trtmesh.router.doors.native import MeshService
from trtmesh.router.doors.openai.door import OpenAi
from trtmesh.router.doors.openai.served import ServedModels
from trtmesh.router.doors.triton.grpc.door import SERVICE_NAME, TritonDoor
from trtmesh.router.doors.triton.triton import open_triton
from trtmesh.router.fleet.bridge import Bridge
from trtmesh.router.fleet.discovery import Discovery, check_engines, check_entries
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.membership import Membership
from trtmesh.router.fleet.pins import Pins
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.gauges import Rooms
from trtmesh.router.handoffs.table import HandoffTable
from trtmesh.router.hedging.hedger import Hedger
from trtmesh.router.links.local import LOCAL, LocalService
from trtmesh.router.links.replica import LinkRules, Replica
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.movement.movement import Movement
from trtmesh.router.receipts import Receipts
from trtmesh.router.recorder import Recorder
from trtmesh.router.requests.context import Mesh
from trtmesh.router.requests.requests import Requests
from trtmesh.router.settings import RouterSettings
from trtmesh.router.streams.client_stream import WriteScheduler
from trtmesh.router.tokenizers.local_tokenizer import LocalTexts, LocalTokenizer
from trtmesh.router.tokenizers.pool import TokenizerPool
from trtmesh.router.tokenizers.tokenizer import Tokenizer
from trtmesh.v1 import router_pb2, router_pb2_grpc

WATCH_SECONDS = 0.1
"""Interval between updates of health and looks for slow clients."""

FAREWELL_SECONDS = 2.0
"""Longest wait for items to end with the error of a broken engine inside."""


class Router:
    def __init__(
        self,
        settings: RouterSettings,
        runtime: Runtime,
        tokenizer: LocalTexts | None = None,
        engine: LocalService | None = None,
    ) -> None:
        """`tokenizer` serves in this process, if `router.tokenizers` says so; `engine` is the one of a mesh in one
        process."""
        check_engines("router.engines", settings.engines)
        check_entries("router.tokenizers", settings.other_tokenizers)
        self._settings = settings
        self._runtime = runtime
        names = ("trtmesh.v1.MeshService",)
        triton = (SERVICE_NAME,) if settings.triton.enabled else ()
        self.service_names: Sequence[str] = (*names, *triton)
        runtime.descriptors = reflection_pool(router_pb2.DESCRIPTOR, grpc_service_pb2.DESCRIPTOR)
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._metrics = RouterMetrics()
        self._callers = Callers(settings.api_keys, settings.rate_limit, self._metrics)
        runtime.guard = CallerGuard(self._callers) if self._callers.check_keys else None
        runtime.compression = settings.compression
        runtime.message_limits = MessageLimits()
        self._fleet = Fleet(settings.placement, self._metrics, settings.handoff, settings.models)
        self._handoffs = HandoffTable(self._fleet, self._metrics)
        self._hedger = Hedger(settings.hedge_share, self._fleet, self._metrics)
        self._followed = self._followed_router() if settings.adapters.follow else None
        fetch = self._followed.fetch if self._followed else None
        self._adapters = Adapters(settings.adapters, self._metrics, fetch)
        self._rules = LinkRules(
            settings.deadlines, settings.max_message_bytes, lambda: runtime.certificates.peers
        )
        self._tokenizers = TokenizerPool(
            self._metrics, self._fleet.touch_all, expected=bool(settings.tokenizers)
        )
        self._tokenizer, self._engine = tokenizer, engine
        self._admission = Admission(settings.admission)
        runtime.admission = MessageAdmission(self._admission.request_bytes.counting)
        self._recorder = Recorder(settings.record.file) if settings.record.file else None
        self._receipts = Receipts(settings.receipts)
        self._canary = None
        if settings.canary_share:
            self._canary = Canary(
                settings.canary_share, self._fleet, self._adapters, self._receipts, self._metrics
            )
        mesh = Mesh(
            self._fleet,
            self._handoffs,
            self._adapters,
            self._tokenizers,
            self._admission,
            RateLimiter(),
            self._metrics,
            WriteScheduler(),
            settings.retries,
            self._receipts,
            self._recorder,
            self._canary,
            runtime.tracer,
        )
        self._requests = Requests(mesh, settings.client)
        self._links: dict[Replica, asyncio.Task[None]] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._discoveries: list[Discovery] = []
        self._members = Membership(
            self._fleet,
            self._make_worker,
            self._link,
            settings.admin.allow_link_local,
        )
        self._movement = Movement(self._fleet, self._members)
        self._http = self._make_http() if settings.http.port is not None else None
        self._triton = self._open_triton() if settings.triton.enabled else None
        generating: Mapping[str, Handler] = {}
        if self._http is not None:
            served = ServedModels(
                self._fleet, self._adapters, self._requests, settings.openai.aliases
            )
            openai = OpenAi(
                settings.openai,
                self._requests,
                served,
                self._tokenizers,
                self._metrics,
                lambda: not runtime.health.problems,
                self._http,
            )
            generating = openai.generating
        self._admin_door = self._make_admin_door(generating)
        runtime.registry.register(self._metrics)
        rooms = Rooms(mesh, self._requests, self._callers, self._discoveries)
        runtime.registry.register(rooms)
        if self._http is not None:
            self._http.app.on_response_prepare.append(LoadHeader(rooms.load).tell)
        self._line_files = [each for each in (self._recorder, self._receipts.file) if each]
        for file in self._line_files:
            runtime.registry.register(file)

    def register(self, server: grpc.aio.Server) -> None:
        settings = self._settings
        mesh_service = MeshService(self._requests, self._callers, self._metrics)
        router_pb2_grpc.add_MeshServiceServicer_to_server(mesh_service, server)
        self._runtime.addresses["admin_address"] = self._admin_door.listen()
        if self._triton is not None:
            self._triton.register(server)
        if self._http is not None and settings.http.port is not None:
            address = self._http.listen(settings.host, settings.http.port)
            self._runtime.addresses["http_address"] = address

    def _followed_router(self) -> Followed:
        settings = self._settings.adapters
        if settings.directory:
            raise SettingsError(
                "excludes router.adapters.follow: routers share a registry by directory or by address",
                setting="router.adapters.directory",
            )
        check_address(settings.follow, "router.adapters.follow")
        token = AdminToken.read(settings.follow_token_file, os.environ)
        return Followed(
            settings.follow,
            token,
            self._settings.max_message_bytes,
            self._runtime.certificates.peer_files,
        )

    def _make_admin_door(self, generating: Mapping[str, Handler]) -> AdminDoor:
        settings, certificates = self._settings, self._runtime.certificates
        service = RouterAdminService(
            self._fleet,
            self._handoffs,
            self._adapters,
            self._members,
            self._tokenizers,
            self._requests,
            self._hedger,
            self._movement,
            self._discoveries,
            self._runtime,
        )
        token = AdminToken.read(settings.admin.token_file, os.environ)
        if token is None and settings.admin.console == "token":
            raise SettingsError(
                f"is token, and there is none: set admin.token_file or {AdminToken.variable}",
                setting="router.admin.console",
            )
        if token is not None:
            self._runtime.guarded.add("admin_address")
        has_console = settings.admin.console != "none"
        console = Console(
            service,
            settings.admin,
            token,
            self._requests,
            self._callers,
            self._metrics,
            generating,
            self._name,
        )
        return AdminDoor(
            service,
            settings.admin,
            token,
            console if has_console else None,
            settings.max_message_bytes,
            certificates.server(HTTP_1_1, H2) if has_console else certificates.server(H2),
            settings.connections,
        )

    def _make_http(self) -> HttpPort:
        settings = self._settings
        return HttpPort(
            self._callers,
            settings.http,
            settings.connections,
            settings.max_message_bytes,
            self._runtime.certificates.server(HTTP_1_1),
            self._runtime.admission,
            self._metrics,
        )

    def _open_triton(self) -> TritonDoor:
        settings = self._settings
        return open_triton(
            settings.triton,
            settings.models,
            settings.http,
            self._http,
            self._runtime,
            self._fleet,
            self._tokenizers,
            self._requests,
            self._callers,
            self._metrics,
        )

    async def start(self) -> None:
        await self._admin_door.open()
        if self._http is not None:
            await self._http.server.open()
        await self._adapters.refresh()
        await self._tell_health()
        settings = self._settings
        if self._tokenizer is not None:
            self._join_tokenizer(LOCAL)
        # Tokenizers first: a connecting worker is told the mesh's tokenizer.
        self._discoveries += [
            Discovery(
                settings.other_tokenizers,
                self._join_tokenizer,
                self._leave_tokenizer,
                Address.parse,
                self._tokenizers.is_in_use,
                partial(setattr, self._tokenizers, "lookup_problem"),
            ),
            Discovery(
                settings.engines,
                self._members.join,
                self._members.leave,
                parse_engine,
                self._members.is_in_use,
                partial(setattr, self._fleet, "lookup_problem"),
            ),
        ]
        for discovery in self._discoveries:
            await discovery.resolve()
            self._keepers.append(asyncio.create_task(discovery.follow()))
        if self._engine is not None:
            self._members.join(LOCAL)
            self._keepers.append(asyncio.create_task(self._end_with(self._engine)))
        for keep in (
            self._watch(),
            self._adapters.watch(),
            self._callers.watch(),
            Pins(self._fleet, self._adapters).run(),
        ):
            self._keepers.append(asyncio.create_task(keep))
        if self._canary is not None:
            self._keepers.append(asyncio.create_task(self._canary.run()))
        if self._hedger.enabled:
            self._keepers.append(asyncio.create_task(self._hedger.run()))
        if settings.defragment:
            self._keepers.append(asyncio.create_task(self._movement.run()))
        if self._followed is not None:
            following = self._followed.follow(self._adapters.take, self._adapters.tell)
            self._keepers.append(asyncio.create_task(following))
        for file in self._line_files:
            self._keepers.append(asyncio.create_task(file.run()))
        for keeper in self._keepers:
            keeper.add_done_callback(self._on_keeper_done)
        for local in filter(None, (self._tokenizer, self._engine)):
            await local.start(self._runtime.health)

    async def drain(self) -> None:
        self._retire_connections()
        # Balancers may not know yet that health says NOT_SERVING.
        await asyncio.sleep(self._settings.min_drain_seconds)
        self._retire_connections()
        try:
            await self._requests.drain()
        finally:
            # Requests beyond the grace end here; their clients may resume on another router.
            self._requests.send_away()

    def _retire_connections(self) -> None:
        """Sends the clients of every door away from this router, after what they are doing."""
        self._runtime.retire_connections()
        if self._http is not None:
            self._http.server.retire_connections()

    async def stop(self) -> None:
        tasks = [*self._keepers, *self._links.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.server.close()
        await self._admin_door.close()
        await self._adapters.close()
        for local in filter(None, (self._engine, self._tokenizer)):
            await local.stop()

    async def _end_with(self, engine: LocalService) -> None:
        """Ends the process with the engine inside, after the items, which no worker continues."""
        error = await asyncio.shield(engine.runtime.failure)
        self._members.leave(LOCAL)
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_SECONDS):
                await self._requests.drain()
        self._runtime.fail(error)

    def _join_tokenizer(self, address: str) -> None:
        if (known := self._tokenizers.tokenizers.get(address)) is not None:
            known.leaving = False
            if known.ready:
                self._tokenizers.on_ready(known)
            return
        tokenizer = (
            LocalTokenizer(self._tokenizer, self._rules, self._tokenizers)
            if self._tokenizer is not None and address == LOCAL
            else Tokenizer(address, self._rules, self._tokenizers)
        )
        self._tokenizers.tokenizers[address] = tokenizer
        self._link(tokenizer)

    def _leave_tokenizer(self, address: str) -> None:
        if (tokenizer := self._tokenizers.tokenizers.get(address)) is not None:
            tokenizer.leaving = True

    def _make_worker(self, address: str) -> Worker:
        bridge = self._bridge_of(address)
        return Worker(
            address,
            # A bridge listens on the loopback.
            replace(self._rules, tls_of_peers=plain_text) if bridge else self._rules,
            bridge=bridge,
            router_name=self._name,
            first_tokenizer=self._tokenizers.wait_for_first,
            fingerprint_of=self._tokenizers.fingerprint_of,
            metrics=self._metrics,
            kv_index=self._fleet.kv_index,
            adapters=self._adapters,
            on_change=self._fleet.changed,
            on_touch=self._fleet.touched.add,
            on_load=self._fleet.loaded.add,
            twin_of=self._fleet.twin_of,
            local=self._engine if address == LOCAL else None,
        )

    def _bridge_of(self, address: str) -> Bridge | None:
        """The bridge to a foreign engine; None for an engine of ours."""
        if not is_foreign(address):
            return None
        settings = self._settings
        engine = ForeignAddress.parse(address)
        return Bridge(engine, settings.foreign, settings.max_message_bytes)

    def _link(self, replica: Replica) -> None:
        # Outside the context of an admin's call, since a link's log lines belong to no request.
        self._links[replica] = asyncio.create_task(replica.run(), context=Context())

    def _forget_replicas(self) -> None:
        """Forgets idle replicas without an address: a stopping replica loses the address first and may finish."""
        gone: list[Replica] = [*self._fleet.forget_leavers(), *self._tokenizers.forget_leavers()]
        for replica in gone:
            self._links.pop(replica).cancel()

    async def _watch(self) -> None:
        while True:
            await self._tell_health()
            self._fleet.refresh()
            self._handoffs.tick(asyncio.get_running_loop().time())
            self._requests.end_slow_clients()
            self._forget_replicas()
            await next_tick(WATCH_SECONDS)

    async def _tell_health(self) -> None:
        health = self._runtime.health
        if self._fleet.ready:
            await health.well("workers")
        else:
            await health.unwell("workers", "no worker is ready")
        if self._tokenizers.ready or not self._settings.tokenizers:
            await health.well("tokenizers")
        else:
            await health.unwell("tokenizers", "no tokenizer is ready")
        await health.tell("adapters", self._adapters.problem)

    def _on_keeper_done(self, task: asyncio.Task[None]) -> None:
        """Ends the process with a background task, whose end is a defect."""
        with suppress(asyncio.CancelledError):
            if (error := task.exception()) is not None:
                self._runtime.fail(error)
