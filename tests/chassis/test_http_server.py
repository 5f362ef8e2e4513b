"""The HTTP server's limits: what is no request, heads that do not end, answers that nobody reads."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web
from trtmesh.chassis.http_server import MAX_HEADERS, MAX_LINE_BYTES, HttpLimits, HttpServer

LARGE = b"x" * 2**24
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100)
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))


@asynccontextmanager
async def serving(idle_seconds: float = 60, stall_seconds: float = 60) -> AsyncIterator[int]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=LARGE if request.path == "/large" else b"small")

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    server = HttpServer(app, HttpLimits(8, idle_seconds, stall_seconds))
    _, port = server.listen("127.0.0.1", 0, "test")
    await server.open()
    try:
        yield port
    finally:
        await server.close()


async def answer_to(port: int, sent: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(HTTP2, id="http2"),
        pytest.param(TLS, id="tls"),
        pytest.param(b"\x00" * 1000, id="zeros"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nA\x1b[31mB: y\r\n\r\n", id="escape"),
    ],
)
async def test_bytes_that_are_no_request_get_a_short_line_and_a_400(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as port:
        answer = await answer_to(port, sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 "))
    assert "expects a request of HTTP/1.1" in json.loads(body)["error"]
    (line,) = [each for each in caplog.records if "no request of HTTP/1.1" in each.getMessage()]
    assert len(line.getMessage()) < 250
    assert not [each for each in caplog.records if each.exc_info]


def head_of(line: int, headers: int) -> bytes:
    """A request with a header of `line` bytes, name and separator included, among `headers`."""
    rest = b"".join(b"X-%d: y\r\n" % number for number in range(headers - 3))
    long = b"X-Long: " + b"x" * (line - len("X-Long: "))
    return b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + long + b"\r\n" + rest + b"\r\n"


async def test_heads_are_limited() -> None:
    async with serving() as port:
        assert b" 200 OK\r\n" in await answer_to(port, head_of(MAX_LINE_BYTES, 10))
        assert b" 400 Bad Request\r\n" in await answer_to(port, head_of(MAX_LINE_BYTES + 10, 10))
        assert b" 200 OK\r\n" in await answer_to(port, head_of(100, MAX_HEADERS))
        assert b" 400 Bad Request\r\n" in await answer_to(port, head_of(100, MAX_HEADERS + 1))


async def test_head_must_arrive_in_time() -> None:
    async with serving(idle_seconds=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        async with asyncio.timeout(60):
            # Bytes now and then do not prolong it.
            while True:
                writer.write(b"X")
                try:
                    async with asyncio.timeout(0.1):
                        assert await reader.read() == b""
                        break
                except TimeoutError:
                    continue
        writer.close()


async def bytes_left(client: socket.socket) -> int:
    """What can still be read up to the end of the connection."""
    loop, got = asyncio.get_running_loop(), 0
    with suppress(ConnectionResetError):
        while chunk := await loop.sock_recv(client, 2**20):
            got += len(chunk)
    return got


async def test_client_that_reads_nothing_is_cut_off() -> None:
    async with serving(stall_seconds=0.3) as port:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(1)
            assert await bytes_left(client) < len(LARGE)


async def test_client_that_reads_slowly_gets_everything() -> None:
    async with serving(stall_seconds=0.5) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = 0
        while chunk := await reader.read(2**20):
            got += len(chunk)
            await asyncio.sleep(0.01)
        writer.close()
        assert got > len(LARGE)
