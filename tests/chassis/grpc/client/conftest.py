"""Servers for the client: ours, grpc.aio's, and one with scripted frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import pytest
import pytest_asyncio
import uvloop
from chassis.grpc.client.scripted_server import PATIENCE_SECONDS, Peer
from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from trtmesh.chassis.grpc.client import ClientConnection, connected
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.http2.frames import (
    FrameType,
    Setting,
    frame,
    settings,
)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Services run on uvloop, with other transports."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest_asyncio.fixture(params=["ours", "grpc.aio"])
async def example(request: pytest.FixtureRequest) -> AsyncIterator[Example]:
    limits = [("grpc.max_receive_message_length", MOST_BYTES), ("grpc.max_send_message_length", -1)]
    server: Any = (
        GrpcServer(MOST_BYTES) if request.param == "ours" else grpc.aio.server(options=limits)
    )
    async with serving(Example(server=server)) as example:
        yield example


@pytest_asyncio.fixture
async def connection(example: Example) -> AsyncIterator[ClientConnection]:
    async with connected(example.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        yield connection


@pytest_asyncio.fixture
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    """Sends SETTINGS first, unless parametrized indirectly with other bytes."""
    peer = Peer(getattr(request, "param", settings({})))
    server = await asyncio.start_server(peer.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    peer.address = f"{host}:{port}"
    try:
        yield peer
    finally:
        peer.closed.set()
        server.close()
        await server.wait_closed()


FAILED_HANDSHAKES = {
    "HTTP/1.1": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is not a gRPC server"),
    "another frame": (frame(FrameType.PING, 0, 0, bytes(8)), "first frame is not SETTINGS"),
    "invalid SETTINGS": (
        frame(FrameType.SETTINGS, 0, 0, b"\0"),
        "SETTINGS has an invalid length",
    ),
    "INITIAL_WINDOW_SIZE too large": (
        settings({Setting.INITIAL_WINDOW_SIZE: 2**31}),
        "INITIAL_WINDOW_SIZE is",
    ),
}
"""Responses of servers without gRPC, and the error of each."""
