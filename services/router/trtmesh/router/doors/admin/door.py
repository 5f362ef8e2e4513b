"""The address where admins reach a router: a server of its own, apart from the one that clients reach."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from trtmesh.chassis.addresses import listen
from trtmesh.chassis.admin_token import ADMIN_TOKEN_VARIABLE, AdminToken
from trtmesh.chassis.errors import Unauthenticated
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.rpc import answering
from trtmesh.v1 import router_admin_pb2_grpc

log = logging.getLogger(__name__)

SERVICE_NAME = "trtmesh.v1.RouterAdminService"
HEALTH_NAME = "grpc.health.v1.Health"
LOOPBACK_HOSTS = ("127.", "localhost", "::1", "[::1]")


class AdminDoor:
    """Serves the admin service from `open` to `close`. It is well while it is open: admins come when the mesh is not.

    With a token, every call but health checks must carry it.
    """

    def __init__(
        self,
        service: router_admin_pb2_grpc.RouterAdminServiceServicer,
        token: AdminToken | None,
        max_message_bytes: int,
    ) -> None:
        self._guarded = token is not None
        self._server = GrpcServer(max_message_bytes, TokenGuard(token) if token else None)
        router_admin_pb2_grpc.add_RouterAdminServiceServicer_to_server(service, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def listen(self, host: str, port: int) -> str:
        """Takes the address and returns it. Raises StartupError."""
        if not self._guarded and not host.startswith(LOOPBACK_HOSTS):
            log.warning(
                "admin_host is %s and no token is asked for: whoever reaches it may stop requests and remove workers;"
                " set admin_token_file or %s",
                host,
                ADMIN_TOKEN_VARIABLE,
            )
        address = listen(self._server, host, port, "listen for admins")
        log.info("listening for admins on %s", address)
        return address

    async def open(self) -> None:
        """Answers from now on."""
        await self._health.set(SERVICE_NAME, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()

    async def close(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace=0.5)


class TokenGuard:
    """Ends calls that do not carry the token before their handlers see them."""

    def __init__(self, token: AdminToken) -> None:
        self._token = token

    def __call__(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        of_health = call.method.startswith(f"/{HEALTH_NAME}/")
        if of_health or self._token.is_in(call.invocation_metadata or ()):
            return None
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def _refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
    async with answering(context):
        raise Unauthenticated(
            "this router asks its admins for a token, and the call carried none or a wrong one"
        )
    raise RuntimeError("unreachable: answering re-raises")
