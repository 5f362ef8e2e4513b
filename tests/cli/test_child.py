"""Health of processes about to serve or to end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.cli.child import Addresses, Child
from trtmesh.cli.plan import ProcessPlan

MESSAGE_BYTES = 64 * 2**20


class FickleHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped library
    """Ends the first watches with a status, then reports SERVING."""

    def __init__(self, *endings: grpc.StatusCode) -> None:
        self.endings = list(endings)

    async def Watch(self, request: Any, context: Any) -> None:
        if self.endings:
            await context.abort(self.endings.pop(0), "about to end")
        await context.write(
            health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        )


async def watch(health: FickleHealth) -> None:
    server = GrpcServer(MESSAGE_BYTES)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    child = Child(ProcessPlan("engine-0", "engine", (), ports={}), lambda _name, _line: None)
    child.bound = Addresses(f"127.0.0.1:{port}")
    try:
        async with asyncio.timeout(60):
            await child._watch_health()
    finally:
        await server.stop(grace=None)


async def test_cancelled_watch_is_not_a_failure() -> None:
    health = FickleHealth(grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    await watch(health)
    assert health.endings == []


async def test_process_without_health_service_is_a_failure() -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await watch(FickleHealth(grpc.StatusCode.UNIMPLEMENTED))
