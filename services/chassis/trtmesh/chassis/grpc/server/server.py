"""The server: addresses, handlers and open connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from trtmesh.chassis.addresses import listeners
from trtmesh.chassis.grpc.server.call import Handler
from trtmesh.chassis.grpc.server.connection import ServerConnection
from trtmesh.chassis.grpc.server.headers import RequestHeaders
from trtmesh.chassis.http2.connection import set_user_timeout

BACKLOG = 1024
"""Connections that may wait to be accepted."""

CANCELLATION_SECONDS = 0.5
"""How long cancelled handlers may take to end."""


@dataclass(frozen=True, slots=True)
class CallDetails(grpc.HandlerCallDetails):
    """A call before its handler is chosen."""

    method: str
    invocation_metadata: Any


Guard: TypeAlias = "Callable[[grpc.HandlerCallDetails], Handler | None]"
"""Returns a refusing handler, or None to admit the call."""


class GrpcServer(grpc.aio.Server):
    """Serves handlers on addresses from `start` to `stop`."""

    def __init__(self, max_message_bytes: int, guard: Guard | None = None) -> None:
        self.max_message_bytes = max_message_bytes
        self._guard = guard
        self._handlers: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._connections: set[ServerConnection] = set()
        self._changed = asyncio.Event()
        self._stopping = False
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(
        self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]
    ) -> None:
        self._generic += generic_rpc_handlers

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Handler]
    ) -> None:
        for name, handler in method_handlers.items():
            self._handlers[f"/{service_name}/{name}"] = handler

    def add_insecure_port(self, address: str) -> int:
        """Binds every address that the host of `address` resolves to; returns the port. Raises RuntimeError."""
        host, _, port = address.rpartition(":")
        try:
            taken = listeners(host.strip("[]"), int(port))
        except OSError as error:
            raise RuntimeError(f"cannot listen on {address}: {error}") from error
        for each in taken:
            set_user_timeout(each)
        self._sockets += taken
        number: int = taken[0].getsockname()[1]
        return number

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("this server has no TLS")

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._sockets:
            server = await loop.create_server(
                lambda: ServerConnection(self), sock=self._sockets[0], backlog=BACKLOG
            )
            self._servers.append(server)
            del self._sockets[0]

    async def stop(self, grace: float | None) -> None:
        """Refuses new calls, lets open calls run for `grace` seconds, then ends them."""
        self._stopping = True
        for server in self._servers:
            server.close()
        for taken in self._sockets:
            taken.close()
        for connection in self._connections:
            connection.drain()
        await _ended(self._tasks, grace or 0.0)
        for connection in self._connections:
            connection.end_calls()
        await _ended(self._tasks, CANCELLATION_SECONDS)
        for connection in self._connections:
            connection.close()
        while self._connections:
            self._changed.clear()
            await self._changed.wait()
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - grpc.aio's own
        """Returns whether it timed out."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False

    def find_handler(self, headers: RequestHeaders) -> Handler | None:
        """The handler of a call; None for an unknown method."""
        details = CallDetails(headers.path, headers.metadata)
        if self._guard is not None and (refusal := self._guard(details)) is not None:
            return refusal
        if (handler := self._handlers.get(headers.path)) is not None:
            return handler
        for generic in self._generic:
            if (handler := generic.service(details)) is not None:
                return handler
        return None

    def connection_opened(self, connection: ServerConnection) -> None:
        self._connections.add(connection)
        if self._stopping:
            # Accepted before `stop`.
            connection.close()

    def connection_closed(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        self._changed.set()

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for connection in self._connections for task in connection.tasks]


async def _ended(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    if tasks and seconds > 0:
        await asyncio.wait(tasks, timeout=seconds)
