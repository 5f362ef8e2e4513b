"""Everything of Triton that a router serves: the models, the doors to them, and their metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trtmesh.chassis.service import Runtime
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.http.port import HttpPort
from trtmesh.router.doors.triton.engines import Engines
from trtmesh.router.doors.triton.generations import Generations
from trtmesh.router.doors.triton.grpc.door import TritonDoor
from trtmesh.router.doors.triton.http.door import HttpDoor, HttpSettings
from trtmesh.router.doors.triton.server import TritonServer
from trtmesh.router.doors.triton.settings import TritonSettings
from trtmesh.router.doors.triton.templates.texts import Texts
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.requests.requests import Requests
from trtmesh.router.tokenizers.pool import TokenizerPool


def open_triton(
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
) -> TritonDoor:
    """Serves Triton's models at a port over HTTP, and returns the door for gRPC. Raises SettingsError."""
    texts = Texts(tokenizers, requests.served_model)
    engines = Engines(fleet, requests)
    generations = Generations(requests, texts, metrics, engines)
    server = TritonServer(
        settings,
        models,
        generations,
        texts,
        engines,
        metrics,
        is_ready=lambda: not runtime.health.problems,
    )
    if port is not None:
        HttpDoor(server, http, os.environ, port)
    runtime.more_metrics = server.metrics.text
    return TritonDoor(server, callers)
