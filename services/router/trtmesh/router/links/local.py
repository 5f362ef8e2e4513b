"""A service in the router's own process: its handlers are called without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trtmesh.chassis.errors import StartupError
from trtmesh.chassis.grpc.client import Connection
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.health import Health
from trtmesh.chassis.in_memory import InMemoryConnection
from trtmesh.chassis.service import Runtime, Service
from trtmesh.chassis.settings import ServiceSettings

LOCAL = "local"
"""The entry of `router.tokenizers` that means this process, and the address of a replica there."""


class LocalService:
    """A service of this process. Commands and events are handed over as they are.

    The service may fail like a separate process: streams end by errors, and a text that breaks the service ends an
    item. The service cannot be lost or slow alone.
    """

    def __init__(self, service: Service, settings: ServiceSettings, runtime: Runtime) -> None:
        """`runtime` belongs to the service, whose failure is not yet a failure of the process."""
        self.runtime = runtime
        self._service = service
        self._settings = settings
        self._started = asyncio.Event()
        self._server = GrpcServer(settings.max_message_bytes)
        service.register(self._server)

    async def start(self, health: Health) -> None:
        """Loads the service, as a part of the process with `health`. Raises StartupError."""
        self.runtime.health = health
        try:
            await self._service.start()
        except StartupError as error:
            error.setting = self._settings.spelling(error.setting)
            raise
        self._started.set()

    async def stop(self) -> None:
        """Ends the streams of the service, and the threads after their work."""
        await self._service.stop()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        """Waits until the service has started."""
        await self._started.wait()
        yield InMemoryConnection(self._server)
