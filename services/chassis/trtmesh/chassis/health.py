"""Health by named components: a process serves when every one of them is well."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

log = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The components of one process and their conjunction as grpc.health.v1.

    It begins with the component `start` unwell, so nothing is served before the process says so.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        # The empty name stands for the process as a whole.
        self._services = ("", *service_names)
        self._servicer = health.aio.HealthServicer()
        self._problems: dict[str, str] = {"start": "starting"}
        self._told: bool | None = None

    async def register(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self._tell()

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong, by component; empty when the process serves."""
        return dict(self._problems)

    async def well(self, component: str) -> None:
        """Reports that nothing is wrong with `component`."""
        if self._problems.pop(component, None) is not None:
            await self._tell()

    async def unwell(self, component: str, problem: str) -> None:
        """Reports what is wrong with `component`."""
        if self._problems.get(component) != problem:
            self._problems[component] = problem
            await self._tell()

    async def _tell(self) -> None:
        serving = not self._problems
        if serving != self._told:
            log.info(
                "serving" if serving else "not serving: %s", *([] if serving else [self._text()])
            )
            self._told = serving
        for service in self._services:
            await self._servicer.set(service, _SERVING if serving else _NOT_SERVING)

    def _text(self) -> str:
        return "; ".join(f"{component}: {problem}" for component, problem in self._problems.items())
