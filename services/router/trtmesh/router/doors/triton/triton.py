"""Everything of Triton that a router serves: the models, the doors to them, and their metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence

import grpc
from trtmesh.chassis.service import Runtime
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.http.port import HttpPort
from trtmesh.router.doors.triton.engines import Engines
from trtmesh.router.doors.triton.generations import Generations
from trtmesh.router.doors.triton.grpc.door import TritonDoor
from trtmesh.router.doors.triton.http.door import HttpDoor, HttpSettings
from trtmesh.router.doors.triton.parameters import Parameters
from trtmesh.router.doors.triton.server import TritonServer
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.texts import Texts
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.requests import Requests
from trtmesh.router.tokenizers.pool import TokenizerPool


class Triton:
    """Serves Triton's models over gRPC, and at a port over HTTP. Raises SettingsError."""

    def __init__(
        self,
        settings: TritonSettings,
        models: Sequence[str],
        http: HttpSettings,
        port: HttpPort | None,
        runtime: Runtime,
        fleet: Fleet,
        tokenizers: TokenizerPool,
        requests: Requests,
        callers: Callers,
        metrics: RouterMetrics,
    ) -> None:
        texts = Texts(tokenizers, requests.served_model)
        engines = Engines(fleet, requests)
        generations = Generations(requests, texts, metrics, engines)
        parameters = Parameters(metrics)
        server = TritonServer(
            settings,
            models,
            generations,
            texts,
            parameters,
            is_ready=lambda: not runtime.health.problems,
            have_roles=engines.have_roles,
        )
        self._door = TritonDoor(server, callers)
        if port is not None:
            HttpDoor(server, http, os.environ).register(port)
        runtime.more_metrics = server.metrics(engines.figures).text

    def register(self, server: grpc.aio.Server) -> None:
        self._door.register(server)
