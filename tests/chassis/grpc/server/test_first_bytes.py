"""A port for gRPC and HTTP/1.1: every connection reaches the server that its first bytes name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from trtmesh.chassis.addresses import listen
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.http2.frames import PREFACE, FrameType, frame
from trtmesh.chassis.http_server import HttpLimits, HttpServer


async def answer(request: web.Request) -> web.Response:
    return web.Response(text=request.method)


class Shared:
    def __init__(self, grpc: GrpcServer, address: str) -> None:
        self.grpc = grpc
        self.host, _, self.port = address.rpartition(":")

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def until_connections(self, number: int) -> None:
        """Waits until the server for gRPC has so many."""
        async with asyncio.timeout(60):
            while len(self.grpc.clients.open) != number:  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(0.005)


@pytest.fixture
async def shared() -> AsyncIterator[Shared]:
    app = web.Application()
    app.router.add_route("*", "/", answer)
    http = HttpServer(app, HttpLimits(64, 64, 2**20, 60.0, 60.0))
    grpc = GrpcServer(2**20, http=http.connection)
    address = listen(grpc, "127.0.0.1", 0)
    await http.open()
    await grpc.start()
    yield Shared(grpc, address)
    await grpc.stop(None)
    await http.close()


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PROPFIND"])
async def test_http_reaches_its_server_byte_by_byte(shared: Shared, method: str) -> None:
    reader, writer = await shared.connect()
    for byte in f"{method} / HTTP/1.1\r\nHost: x\r\n\r\n".encode():
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    assert await reader.readexactly(len(method)) == method.encode()
    # It no longer counts as a connection of gRPC.
    assert not shared.grpc.clients.open
    writer.close()


@pytest.mark.parametrize("at", [1, 2, 3, len(PREFACE)])
async def test_http2_reaches_grpc_in_parts(shared: Shared, at: int) -> None:
    reader, writer = await shared.connect()
    greeting = PREFACE + frame(FrameType.SETTINGS, 0, 0)
    for part in (greeting[:at], greeting[at:]):
        writer.write(part)
        await asyncio.sleep(0.01)
    header = await reader.readexactly(9)
    assert header[3] == FrameType.SETTINGS
    assert len(shared.grpc.clients.open) == 1
    writer.close()


async def test_silent_client_leaves_without_a_trace(shared: Shared) -> None:
    _, writer = await shared.connect()
    writer.write(b"PR")
    await shared.until_connections(1)
    writer.close()
    await writer.wait_closed()
    await shared.until_connections(0)
