from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from client.scripted import ScriptedRouter
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.client import Client
from trtmesh.v1 import router_pb2_grpc

MESSAGE_BYTES = 64 * 2**20


@pytest.fixture
async def router_and_client() -> AsyncIterator[tuple[ScriptedRouter, Client]]:
    # Abstract for mypy: Resume answers UNIMPLEMENTED here.
    servicer = ScriptedRouter()  # type: ignore[abstract]
    server = GrpcServer(MESSAGE_BYTES)
    router_pb2_grpc.add_MeshServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Client(f"127.0.0.1:{port}") as client:
        yield servicer, client
    await server.stop(grace=None)


@pytest.fixture
def router(router_and_client: tuple[ScriptedRouter, Client]) -> ScriptedRouter:
    return router_and_client[0]


@pytest.fixture
def client(router_and_client: tuple[ScriptedRouter, Client]) -> Client:
    return router_and_client[1]
