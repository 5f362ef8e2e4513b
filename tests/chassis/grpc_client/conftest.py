"""Servers that a client talks to: ours and grpc.aio's, and one that speaks frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import pytest
import pytest_asyncio
import uvloop
from chassis.grpc_server.conftest import MOST_BYTES, Example, serving
from chassis.grpc_server.wire import Wire
from trtmesh.chassis.grpc_client import Connection, Method, connected
from trtmesh.chassis.grpc_server import GrpcServer
from trtmesh.chassis.grpc_wire.frames import (
    END_HEADERS,
    PREFACE,
    Kind,
    Setting,
    frame,
    parse_settings,
    settings,
)

PATIENCE_SECONDS = 30.0


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Services run on uvloop, whose transports are other ones."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def method(name: str) -> Method[bytes, bytes]:
    """One of the example's methods; its messages are plain bytes."""
    return Method(f"/example.Service/{name}", bytes, bytes)


@pytest_asyncio.fixture(params=["ours", "grpc.aio"])
async def example(request: pytest.FixtureRequest) -> AsyncIterator[Example]:
    limits = [("grpc.max_receive_message_length", MOST_BYTES), ("grpc.max_send_message_length", -1)]
    server: Any = (
        GrpcServer(MOST_BYTES) if request.param == "ours" else grpc.aio.server(options=limits)
    )
    async with serving(Example(server=server)) as example:
        yield example


@pytest_asyncio.fixture
async def connection(example: Example) -> AsyncIterator[Connection]:
    async with connected(example.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        yield connection


class Peer:
    """A server whose frames a test writes; it serves one connection."""

    def __init__(self, greeting: bytes) -> None:
        self._greeting = greeting
        self._accepted: asyncio.Future[Wire] = asyncio.get_running_loop().create_future()
        self.address = ""
        self.closed = asyncio.Event()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._greeting)
        self._accepted.set_result(Wire(reader, writer))
        await self.closed.wait()
        writer.close()

    async def wire(self) -> Wire:
        """The connection, behind what every client begins with."""
        wire = await self._accepted
        assert await wire.reader.readexactly(len(PREFACE)) == PREFACE
        said = dict(parse_settings(await wire.next(Kind.SETTINGS)))
        assert said[Setting.ENABLE_PUSH] == 0
        return wire


@pytest_asyncio.fixture
async def peer(request: pytest.FixtureRequest) -> AsyncIterator[Peer]:
    """Parametrised indirectly with what it says first; else it greets."""
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


def headers(wire: Wire, stream: int, fields: Mapping[str, str], flags: int = 0) -> bytes:
    """A HEADERS frame of a response."""
    block = bytes(wire.encoder.encode(list(fields.items())))
    return frame(Kind.HEADERS, END_HEADERS | flags, stream, block)


HEAD = {":status": "200", "content-type": "application/grpc"}
GREETINGS_OF_NONE = {
    "HTTP/1.1": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no gRPC server"),
    "another frame": (frame(Kind.PING, 0, 0, bytes(8)), "settings must come first"),
    "bad settings": (frame(Kind.SETTINGS, 0, 0, b"\0"), "settings are cut off"),
    "a first window that is too large": (
        settings({Setting.INITIAL_WINDOW_SIZE: 2**31}),
        "the first window is too large",
    ),
}
"""What answers where no gRPC server listens, and what is told of it."""
