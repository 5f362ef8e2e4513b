"""Health by named components: a process serves while all of them are healthy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trtmesh.chassis.rpc import RpcContext

log = logging.getLogger(__name__)

_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

LIVE = "live"
"""Service that is SERVING whenever the event loop answers. Orchestrators restart by it, and never for a busy model."""


class _Statuses(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped library
    """Serves the statuses of services.

    Unlike with the library's servicer, a watcher that does not read delays no change, and a leaving watcher takes no
    update from others.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set at the next change."""

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: RpcContext) -> Any:
        if (status := self._statuses.get(request.service)) is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: RpcContext) -> None:
        told = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != told:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                told = status
            await changed.wait()


class Health:
    """Combines the components of a process into a status of grpc.health.v1.

    The component `start` is unhealthy until the process reports otherwise.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        # The empty name stands for the process as a whole.
        self._services = ("", *service_names)
        self._statuses = _Statuses()
        self._problems: dict[str, str] = {"start": "starting"}
        self._published: bool | None = None
        self._parts: dict[str, str] = {}

    async def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._statuses, server)
        self._statuses.set(LIVE, _SERVING)
        await self._publish()

    @property
    def problems(self) -> dict[str, str]:
        """Problems by component; empty while the process serves."""
        return dict(self._problems)

    async def well(self, component: str) -> None:
        """Clears the problem of `component`."""
        if self._problems.pop(component, None) is not None:
            await self._publish()

    async def unwell(self, component: str, problem: str) -> None:
        """Sets the problem of `component`."""
        if self._problems.get(component) != problem:
            self._problems[component] = problem
            await self._publish()

    async def tell(self, part: str, problem: str) -> None:
        """Publishes the state of a part as a service by the part's name. A problem there does not affect the
        process."""
        if self._parts.get(part) != problem:
            self._parts[part] = problem
            self._statuses.set(part, _NOT_SERVING if problem else _SERVING)

    async def _publish(self) -> None:
        serving = not self._problems
        if serving != self._published:
            if serving or self._problems.keys() != {"start"}:
                log.info("serving" if serving else f"not serving: {self._text()}")
            else:
                log.info("starting")
            self._published = serving
        for service in self._services:
            self._statuses.set(service, _SERVING if serving else _NOT_SERVING)

    def _text(self) -> str:
        return "; ".join(f"{component}: {problem}" for component, problem in self._problems.items())
