"""The admin address of a router: a gRPC server of its own."""

from __future__ import annotations

import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from trtmesh.chassis.addresses import listen
from trtmesh.chassis.bearer import AdminToken
from trtmesh.chassis.connection_settings import ConnectionSettings
from trtmesh.chassis.errors import Unauthenticated
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.rpc import Refusal
from trtmesh.chassis.tls.certificates import ServerTls
from trtmesh.router.doors.admin.console import Console
from trtmesh.router.doors.admin.settings import AdminSettings
from trtmesh.v1 import router_admin_pb2_grpc

log = logging.getLogger(__name__)

SERVICE_NAME = "trtmesh.v1.RouterAdminService"
HEALTH_NAME = "grpc.health.v1.Health"
LOOPBACK_HOSTS = ("127.", "localhost", "::1", "[::1]")


class AdminDoor:
    """Serves RouterAdminService and the console from `open` to `close`, and is healthy even while the mesh is not.

    With a token configured, every call of gRPC except health checks must carry it.
    """

    def __init__(
        self,
        service: router_admin_pb2_grpc.RouterAdminServiceServicer,
        settings: AdminSettings,
        token: AdminToken | None,
        console: Console | None,
        max_message_bytes: int,
        tls: ServerTls | None = None,
        connections: ConnectionSettings | None = None,
    ) -> None:
        self._settings = settings
        self._console = console
        self._guarded = token is not None
        guard = TokenGuard(token) if token else None
        http = console.http.connection if console else None
        self._server = GrpcServer(max_message_bytes, guard, tls, connections, http=http)
        router_admin_pb2_grpc.add_RouterAdminServiceServicer_to_server(service, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def listen(self) -> str:
        """Binds the address and returns it. Raises StartupError."""
        host = self._settings.host
        if not self._guarded and not host.startswith(LOOPBACK_HOSTS):
            log.warning(
                "admin.host is %s without an admin token: every caller may stop requests and remove workers;"
                " set admin.token_file or %s",
                host,
                AdminToken.variable,
            )
        address = listen(self._server, host, self._settings.port, "listen for admins")
        log.info("listening for admins on %s", address)
        return address

    async def open(self) -> None:
        """Starts to answer."""
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        if self._console is not None:
            await self._console.http.open()
        await self._server.start()

    async def close(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=0.5)
        if self._console is not None:
            await self._console.close()


class TokenGuard:
    """Rejects calls without the token before their handlers run."""

    def __init__(self, token: AdminToken) -> None:
        self._token = token

    def __call__(self, call: grpc.HandlerCallDetails) -> Refusal | None:
        of_health = call.method.startswith(f"/{HEALTH_NAME}/")
        if of_health or self._token.is_in(call.invocation_metadata or ()):
            return None
        return Refusal.of(Unauthenticated("the call has no admin token or a wrong one"))
