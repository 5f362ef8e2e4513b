"""The server: addresses, handlers, and the connections that are open."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from trtmesh.chassis.addresses import listeners
from trtmesh.chassis.grpc.server.call import Handler
from trtmesh.chassis.grpc.server.connection import Connection
from trtmesh.chassis.grpc.server.headers import CallHead
from trtmesh.chassis.http2.keepalive import give_up_unacknowledged

BACKLOG = 1024
"""Connections that may wait to be accepted."""

CANCELLATION_SECONDS = 0.5
"""How long handlers may take to end that were cancelled."""


@dataclass(frozen=True, slots=True)
class CallDetails(grpc.HandlerCallDetails):
    """What is known of a call before its handler is chosen."""

    method: str
    invocation_metadata: Any


Guard: TypeAlias = "Callable[[grpc.HandlerCallDetails], Handler | None]"
"""Who answers a call instead of its handler, because it must not reach it; None where it may."""


class GrpcServer(grpc.aio.Server):
    """Serves the handlers that were added, on every address that was added, from `start` to `stop`."""

    def __init__(self, most_message_bytes: int, guard: Guard | None = None) -> None:
        self.most_message_bytes = most_message_bytes
        self._guard = guard
        self._handlers: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
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
        """Takes every address that `address`, a host and a port, stands for; returns the port. Raises RuntimeError."""
        host, _, port = address.rpartition(":")
        try:
            taken = listeners(host.strip("[]"), int(port))
        except OSError as error:
            raise RuntimeError(f"cannot listen on {address}: {error}") from error
        for each in taken:
            give_up_unacknowledged(each)
        self._sockets += taken
        number: int = taken[0].getsockname()[1]
        return number

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise NotImplementedError("this server speaks no TLS")

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        while self._sockets:
            server = await loop.create_server(
                lambda: Connection(self), sock=self._sockets[0], backlog=BACKLOG
            )
            self._servers.append(server)
            del self._sockets[0]

    async def stop(self, grace: float | None) -> None:
        """Takes no call from now on, lets those that run go on for `grace` seconds, and ends what is left."""
        self._stopping = True
        for server in self._servers:
            server.close()
        for taken in self._sockets:
            taken.close()
        for connection in self._connections:
            connection.leave()
        await _ended(self._tasks, grace or 0.0)
        for connection in self._connections:
            connection.cut_off()
        await _ended(self._tasks, CANCELLATION_SECONDS)
        for connection in self._connections:
            connection.close()
        while self._connections:
            self._changed.clear()
            await self._changed.wait()
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - grpc.aio's own
        """Returns whether it has not stopped within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False

    def find_handler(self, head: CallHead) -> Handler | None:
        """Who serves a call; None where nobody does."""
        details = CallDetails(head.path, head.metadata)
        if self._guard is not None and (refusal := self._guard(details)) is not None:
            return refusal
        if (handler := self._handlers.get(head.path)) is not None:
            return handler
        for generic in self._generic:
            if (handler := generic.service(details)) is not None:
                return handler
        return None

    def opened(self, connection: Connection) -> None:
        """A client has come."""
        self._connections.add(connection)
        if self._stopping:
            # It was accepted before and made behind.
            connection.close()

    def closed(self, connection: Connection) -> None:
        """A client has gone."""
        self._connections.discard(connection)
        self._changed.set()

    @property
    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for connection in self._connections for task in connection.tasks]


async def _ended(tasks: Collection[asyncio.Task[None]], seconds: float) -> None:
    if tasks and seconds > 0:
        await asyncio.wait(tasks, timeout=seconds)
