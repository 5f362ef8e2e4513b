"""The server: addresses, handlers and open connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from trtmesh.chassis.addresses import listeners
from trtmesh.chassis.connection_settings import ConnectionSettings
from trtmesh.chassis.fair.messages import MessageAdmission
from trtmesh.chassis.grpc.compression_settings import CompressionSettings
from trtmesh.chassis.grpc.large_message import MessageLimits
from trtmesh.chassis.grpc.metadata import Metadata
from trtmesh.chassis.grpc.server.call import CallPolicy, Handler
from trtmesh.chassis.grpc.server.compression import Compressor
from trtmesh.chassis.grpc.server.connection import Clients, ServerConnection
from trtmesh.chassis.grpc.server.first_bytes import Factory, FirstBytes
from trtmesh.chassis.grpc.server.headers import RequestHeaders
from trtmesh.chassis.http2.connection import set_user_timeout
from trtmesh.chassis.rpc import Refusal
from trtmesh.chassis.tls.certificates import ServerTls
from trtmesh.chassis.tls.listener import TlsListener, serve

CANCELLATION_SECONDS = 0.5
"""How long cancelled handlers may take to end."""


@dataclass(frozen=True, slots=True)
class CallDetails(grpc.HandlerCallDetails):
    """A call before the choice of a handler."""

    method: str
    invocation_metadata: Any


Guard: TypeAlias = "Callable[[grpc.HandlerCallDetails], Refusal | None]"
"""Returns None to admit a call."""


class GrpcServer(grpc.aio.Server):
    """Serves handlers on addresses from `start` to `stop`."""

    def __init__(
        self,
        max_message_bytes: int,
        guard: Guard | None = None,
        tls: ServerTls | None = None,
        connections: ConnectionSettings | None = None,
        compression: CompressionSettings | None = None,
        message_limits: MessageLimits | None = None,
        admission: MessageAdmission | None = None,
        http: Factory | None = None,
    ) -> None:
        """Without `compression` answers are uncompressed. Without `message_limits` clients are trusted with large
        messages of any content. Without `admission` large messages count in no sum. `http` makes the protocols of
        connections that do not begin as HTTP/2; without it they are refused."""
        policy = CallPolicy(
            max_message_bytes,
            Compressor(compression or CompressionSettings(answers="never")),
            message_limits,
            admission or MessageAdmission(),
        )
        self.clients = Clients(policy, connections or ConnectionSettings(), self._find_handler)
        self._guard = guard
        self._http = http
        self._tls = tls
        self._handlers: dict[str, Handler] = {}
        self._generic: list[grpc.GenericRpcHandler] = []
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server | TlsListener] = []
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
        """Binds every address of the host in `address`, for TLS if the server has a certificate. Returns the port.
        Raises RuntimeError."""
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
        raise NotImplementedError("this server takes its TLS when it is made")

    async def start(self) -> None:
        while self._sockets:
            server = await serve(self._sockets[0], self._connection, self._tls)
            self._servers.append(server)
            del self._sockets[0]

    def _connection(self) -> asyncio.Protocol:
        own = ServerConnection(self.clients)
        return FirstBytes(own, self._http) if self._http is not None else own

    def retire_connections(self) -> None:
        """Has every present client open the next call on another connection, maybe to another process. Open calls
        continue; later connections are served."""
        for connection in [*self.clients.open]:
            connection.retire()

    async def stop(self, grace: float | None) -> None:
        """Refuses new calls, lets open calls run for `grace` seconds, then ends them."""
        self.clients.closing = True
        for server in self._servers:
            server.close()
        for taken in self._sockets:
            taken.close()
        for connection in self.clients.open:
            connection.drain()
        await self._without_calls(grace or 0.0)
        for connection in self.clients.open:
            connection.end_calls()
        await self._without_calls(CANCELLATION_SECONDS)
        for connection in self.clients.open:
            connection.close()
        while self.clients.open:
            self.clients.changed.clear()
            await self.clients.changed.wait()
        self.clients.policy.compressor.close()
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - grpc.aio's own
        """Returns whether the wait timed out."""
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False

    def _find_handler(self, headers: RequestHeaders) -> Handler | Refusal | None:
        """The handler of a call, or the guard's refusal; None for an unknown method."""
        if self._guard is not None:
            refusal = self._guard(CallDetails(headers.path, headers.metadata))
            if refusal is not None:
                return refusal
        return self.handler_of(headers.path, headers.metadata)

    def handler_of(self, path: str, metadata: Metadata = ()) -> Handler | None:
        """The handler of a method; None for an unknown one."""
        if (handler := self._handlers.get(path)) is not None:
            return handler
        details = CallDetails(path, metadata)
        found = (generic.service(details) for generic in self._generic)
        handler = next(filter(None, found), None)
        if handler is not None:
            # Known methods are few.
            self._handlers[path] = handler
        return handler

    async def _without_calls(self, seconds: float) -> None:
        """Waits at most `seconds` until no call is open."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while any(connection.has_calls for connection in self.clients.open):
                    self.clients.changed.clear()
                    await self.clients.changed.wait()
