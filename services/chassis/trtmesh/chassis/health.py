"""Health by named components: a process serves while all of them are healthy."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

log = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """Combines the components of a process into one grpc.health.v1 status.

    The component `start` is unhealthy until the process reports it well.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        # The empty name stands for the process as a whole.
        self._services = ("", *service_names)
        self._servicer = health.aio.HealthServicer()
        self._problems: dict[str, str] = {"start": "starting"}
        self._published: bool | None = None
        self._parts: dict[str, str] = {}

    async def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
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
        """Publishes the state of a part as a service of its own name; the process serves with a problem there."""
        if self._parts.get(part) != problem:
            self._parts[part] = problem
            await self._servicer.set(part, _NOT_SERVING if problem else _SERVING)

    async def _publish(self) -> None:
        serving = not self._problems
        if serving != self._published:
            log.info(
                "serving" if serving else "not serving: %s", *([] if serving else [self._text()])
            )
            self._published = serving
        for service in self._services:
            await self._servicer.set(service, _SERVING if serving else _NOT_SERVING)

    def _text(self) -> str:
        return "; ".join(f"{component}: {problem}" for component, problem in self._problems.items())
