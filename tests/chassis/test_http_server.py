"""The HTTP server's limits: connections, what is no request, heads that do not end, bytes that wait, answers that
nobody reads."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from time import perf_counter

import pytest
import uvloop
from aiohttp import web
from chassis.busy import keep_busy
from leaks import gone, without_collector
from trtmesh.chassis.fair.turns import FIRST_GUESS_SECONDS, START_SLICE_SECONDS
from trtmesh.chassis.http_input import MAX_FRAMING_BYTES, InputTransport
from trtmesh.chassis.http_server import (
    MAX_HEADERS,
    MAX_LINE_BYTES,
    MAX_SEGMENTS,
    HttpConnection,
    HttpLimits,
    HttpServer,
)

LARGE = b"x" * 2**24
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100)
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256))


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def limits(
    max_open: int = 64,
    max_per_address: int = 64,
    idle_seconds: float = 60,
    unread_seconds: float = 60,
    head_seconds: float = 60,
) -> HttpLimits:
    return HttpLimits(max_open, max_per_address, 2**30, idle_seconds, unread_seconds, head_seconds)


@asynccontextmanager
async def server_of(
    handler: Handler, given: HttpLimits | None = None
) -> AsyncIterator[tuple[HttpServer, int]]:
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", handler)
    server = HttpServer(app, given or limits())
    _, port = server.listen("127.0.0.1", 0, "test")
    await server.open()
    try:
        yield server, port
    finally:
        await server.close()


@asynccontextmanager
async def open_server(
    idle_seconds: float = 60, unread_seconds: float = 60
) -> AsyncIterator[tuple[HttpServer, int]]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=LARGE if request.path == "/large" else b"small")

    given = limits(idle_seconds=idle_seconds, unread_seconds=unread_seconds)
    async with server_of(answer, given) as (server, port):
        yield server, port


@asynccontextmanager
async def serving(idle_seconds: float = 60, unread_seconds: float = 60) -> AsyncIterator[int]:
    async with open_server(idle_seconds, unread_seconds) as (_, port):
        yield port


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


async def test_paths_have_few_segments() -> None:
    path = (
        b"GET /"
        + b"a/" * (MAX_SEGMENTS - 1)
        + b"a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    async with serving() as port:
        assert b" 200 OK\r\n" in await answer_to(port, path)
        answer = await answer_to(port, path.replace(b"/a ", b"/a/ "))
    assert answer.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert answer.endswith(b'{"error": "Not Found"}')


@pytest.mark.parametrize("version", [b"0.9", b"1.2", b"2.0", b"3.0"])
async def test_only_http_1_is_served(version: bytes) -> None:
    async with serving() as port:
        answer = await answer_to(port, b"GET / HTTP/%s\r\nHost: x\r\n\r\n" % version)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 505 ", b"HTTP/1.0 400 "))
    assert "HTTP/1.1" in json.loads(body)["error"]


async def test_http_1_0_has_no_chunks() -> None:
    """Who passes it on may take its chunks for the next request."""
    async with server_of(length) as (_, port):
        head = b"POST /a HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = await answer_to(port, head + b"1\r\nx\r\n0\r\n\r\n" + GET)
    assert b" 400 Bad Request\r\n" in answer
    assert answer.count(b"HTTP/1.") == 1 + answer.count(b"HTTP/1.0 has") + answer.count(
        b"or HTTP/1.1"
    )
    assert b"200 OK" not in answer


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", HTTP2])
async def test_no_answer_tells_versions(sent: bytes) -> None:
    async with serving() as port:
        head = (await answer_to(port, sent)).partition(b"\r\n\r\n")[0]
    assert b"\r\nServer: trtmesh" in head
    assert b"aiohttp" not in head
    assert b"Python" not in head


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        pytest.param(b"0\r\n", b"a: b\r\n", id="trailers"),
        pytest.param(b"0\r\na: ", b"b" * 1000, id="trailer"),
        pytest.param(b"1", b";a=b", id="extension"),
        pytest.param(b"", b"0", id="size"),
        pytest.param(b"", b"1\r\nx\r\n", id="small chunks"),
    ],
)
async def test_what_surrounds_a_body_is_limited(begin: bytes, more: bytes) -> None:
    async with server_of(length) as (server, port), connected(port) as (reader, writer):
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + begin)
        with suppress(ConnectionError):
            for _ in range(3 * MAX_FRAMING_BYTES // len(more)):
                writer.write(more)
                await writer.drain()
            async with asyncio.timeout(60):
                assert b"200 OK" not in await reader.read()
        await until(lambda: not server.connection_counts._open)
        assert server.budget.held == 0


@pytest.mark.parametrize(
    "rest", [b"zz\r\n", b"1\r\nxy\r\n", b"0\r\n a\r\n\r\n", b"0\r\na: " + b"b" * 20_000]
)
async def test_a_malformed_body_gets_a_400(rest: bytes) -> None:
    """Though its head was well formed, and its handler waits for the rest."""
    async with server_of(length) as (server, port), connected(port) as (reader, writer):
        head = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\nx\r\n")
        await until(lambda: any(each._body for each in server._open))
        writer.write(rest)
        async with asyncio.timeout(60):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 Bad Request\r\n")
        await until(lambda: not server.connection_counts._open)


@pytest.mark.parametrize(
    "earlier", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["first", "second"]
)
async def test_head_must_arrive_in_time(earlier: bytes) -> None:
    given = limits(head_seconds=0.5)
    async with server_of(length, given) as (_, port), connected(port) as (reader, writer):
        writer.write(earlier)
        if earlier:
            await reader.readuntil(b"!")
        writer.write(b"GET / HTTP/1.1\r\n")
        # Bytes now and then do not prolong it.
        while True:
            writer.write(b"X")
            try:
                async with asyncio.timeout(0.1):
                    assert await reader.read() == b""
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                # A byte met the closed connection.
                break


async def test_a_whole_head_may_wait_long_for_its_answer() -> None:
    """The time of the head ends with the head, and one that begins behind a request has none yet."""

    async def late(request: web.Request) -> web.Response:
        await asyncio.sleep(2.0)
        return await length(request)

    async with (
        server_of(late, limits(head_seconds=1.0)) as (_, port),
        connected(port) as (reader, writer),
    ):
        writer.write(GET[:10])
        await asyncio.sleep(0)
        writer.write(GET[10:])
        await asyncio.sleep(0.05)
        writer.write(GET[:10])
        assert b"200 OK" in await reader.readuntil(b"!")
        writer.write(GET[10:])
        assert b"200 OK" in await reader.readuntil(b"!")


async def bytes_left(client: socket.socket) -> int:
    """What can still be read up to the end of the connection."""
    loop, got = asyncio.get_running_loop(), 0
    with suppress(ConnectionResetError):
        while chunk := await loop.sock_recv(client, 2**20):
            got += len(chunk)
    return got


async def test_client_that_reads_nothing_is_cut_off() -> None:
    async with open_server(unread_seconds=0.3) as (server, port):
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: bool(server.connection_counts._open))
            await until(lambda: not server.connection_counts._open)
            assert await bytes_left(client) < len(LARGE)


async def test_client_that_reads_slowly_gets_everything() -> None:
    """Over a longer time than the limit, which lies far above its pauses."""
    async with serving(unread_seconds=3) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got, began = 0, perf_counter()
        while chunk := await reader.read(2**17):
            got += len(chunk)
            # Slowly for a while; the rest at once.
            await asyncio.sleep(0.1 if perf_counter() < began + 4 else 0)
        writer.close()
        assert got > len(LARGE)


async def length(request: web.Request) -> web.Response:
    return web.Response(text=f"{request.path} {len(await request.read())}!")


@asynccontextmanager
async def connected(
    port: int,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what the server holds sets no event
            await asyncio.sleep(0.01)


GET = b"GET /get HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (limits(max_open=2), "the server has 2 connections, its limit"),
        (limits(max_per_address=2), "127.0.0.1 has 2 connections, the limit of an address"),
    ],
)
async def test_a_connection_beyond_the_limit_is_told_and_closed(
    given: HttpLimits, reason: str
) -> None:
    """While the others have requests."""
    begun, go_on = 0, asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        nonlocal begun
        begun += 1
        await go_on.wait()
        return await length(request)

    async with server_of(answer, given) as (server, port):
        async with connected(port) as (first, write_first), connected(port) as (second, write):
            write_first.write(GET)
            write.write(GET)
            await until(lambda: begun == 2)
            async with connected(port) as (third, _):
                head, _, body = (await third.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert json.loads(body) == {"error": reason}
            go_on.set()
            for reader in (first, second):
                assert b"200 OK" in await reader.readuntil(b"!")
        await until(lambda: not server.connection_counts._open)
        async with connected(port) as (reader, writer):
            writer.write(GET)
            assert b"200 OK" in await reader.readuntil(b"!")


@pytest.mark.parametrize("given", [limits(max_open=4), limits(max_per_address=4)])
@pytest.mark.parametrize("sent", [b"", GET[:-2], GET], ids=["nothing", "half-a-head", "a-request"])
async def test_connections_without_a_request_keep_nobody_out(
    given: HttpLimits, sent: bytes
) -> None:
    """They give way, the longest waiting first, and those with a request do not."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/held":
            begun.set()
            await go_on.wait()
        return await length(request)

    async with server_of(answer, given) as (server, port), AsyncExitStack() as stack:
        held, writer = await stack.enter_async_context(connected(port))
        writer.write(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        await begun.wait()
        idle = []
        for _ in range(20):
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(sent)
            if sent == GET:
                await reader.readuntil(b"!")
            idle.append(reader)
        for reader in idle[:-3]:
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        reader, writer = await stack.enter_async_context(connected(port))
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"!")
        assert server.connection_counts._open.total() == 4
        go_on.set()
        assert b"/held 0!" in await held.readuntil(b"!")
    await until(lambda: not server.connection_counts._open)
    assert not server._waiting


async def test_the_address_with_most_idle_connections_makes_room() -> None:
    async with server_of(length, limits(max_open=4)) as (_, port), AsyncExitStack() as stack:
        few, write_few = await stack.enter_async_context(connected(port))
        loop = asyncio.get_running_loop()
        for _ in range(20):
            crowd = stack.enter_context(socket.socket())
            crowd.setblocking(False)
            crowd.bind(("127.0.0.2", 0))
            await loop.sock_connect(crowd, ("127.0.0.1", port))
        write_few.write(GET)
        assert b"200 OK" in await few.readuntil(b"!")


def post(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (
        path.encode(),
        len(body),
        body,
    )


async def test_bodies_arrive_whole_and_in_order() -> None:
    chunks = b"1\r\nx\r\n" * 5_000 + b"0\r\n\r\n"
    chunked = b"POST /chunks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
    async with server_of(length) as (server, port):
        async with connected(port) as (reader, writer):
            writer.write(post("/a", bytes(5_000_000)) + GET * 100 + chunked + post("/b", b"x"))
            expected = ["/a 5000000!", *["/get 0!"] * 100, "/chunks 5000!", "/b 1!"]
            for each in expected:
                assert (await reader.readuntil(b"!")).endswith(b"\r\n\r\n" + each.encode())
        assert server.budget.held == 0
        await until(lambda: not server.connection_counts._open)


async def test_the_body_behind_a_running_request_waits_and_counts() -> None:
    going_on = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/first":
            await going_on.wait()
        return await length(request)

    async with server_of(answer) as (server, port), connected(port) as (reader, writer):
        writer.write(post("/first", b"x"))
        writer.write(post("/second", bytes(100_000)) + post("/third", bytes(100_000)))
        await until(lambda: server.budget.held > 0)
        going_on.set()
        for each in (b"/first 1!", b"/second 100000!", b"/third 100000!"):
            assert (await reader.readuntil(b"!")).endswith(each)
        assert server.budget.held == 0


async def test_a_head_that_does_not_end_counts() -> None:
    async with server_of(length) as (server, port), connected(port) as (reader, writer):
        writer.write(GET[:-2] + (b"X: " + b"x" * 5000 + b"\r\n") * 10)
        await until(lambda: server.budget.held > 50_000)
        writer.write(b"\r\n")
        assert b"200 OK" in await reader.readuntil(b"!")
        assert server.budget.held == 0


async def test_what_a_lost_connection_held_counts_no_longer() -> None:
    async with server_of(length) as (server, port):
        async with connected(port) as (_, writer):
            writer.write(GET[:-2] + (b"X: " + b"x" * 5000 + b"\r\n") * 10)
            await until(lambda: server.budget.held > 50_000)
        await until(lambda: server.budget.held == 0)


BODY = post("/", bytes(100_000))


@pytest.mark.parametrize(
    ("sent", "answers"),
    [(b"", 0), (GET, 1), (GET * 100, 100), (BODY, 1), (GET + BODY[:-1], 1), (GET + GET[:-1], 1)],
    ids=["nothing", "one", "many", "body", "unfinished-body", "unfinished-head"],
)
async def test_lost_connections_are_freed_without_the_collector(sent: bytes, answers: int) -> None:
    with without_collector():
        async with server_of(length) as (server, port):
            async with connected(port) as (reader, writer):
                await until(lambda: server.connection_counts._open.total() == 1)
                writer.write(sent)
                for _ in range(answers):
                    await reader.readuntil(b"!")
            del reader, writer
            await gone(HttpConnection, InputTransport)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("path", ["/whole", "/stream"])
def test_a_client_that_sends_no_more_is_gone(
    path: str, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """Although it reads on."""
    with without_collector(), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_close_the_sending_half(path))


async def _close_the_sending_half(path: str) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if request.path == "/stream":
            await response.prepare(request)
            await response.write(b"first!")
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return response

    async with server_of(answer) as (server, port), asyncio.timeout(60):
        async with connected(port) as (reader, writer):
            writer.write(GET.replace(b"/get", path.encode()))
            await begun.wait()
            writer.write_eof()
            await cancelled.wait()
            read = await reader.read()
            assert read.endswith(b"first!\r\n") if path == "/stream" else not read
        assert not server.connection_counts._open
        del reader, writer
        await gone(HttpConnection, InputTransport)


async def test_few_of_many_requests_begin_in_a_pass() -> None:
    """So that streams advance between them."""
    begun = list[str]()

    async def work(request: web.Request) -> web.Response:
        begun.append(request.path)
        keep_busy(FIRST_GUESS_SECONDS)
        return web.Response(text="!")

    async with server_of(work) as (_, port), AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(port)) for _ in range(50)]
        for _, writer in clients:
            writer.write(GET)
        in_passes = list[int]()
        while len(begun) < len(clients):
            before = len(begun)
            await asyncio.sleep(0)
            in_passes.append(len(begun) - before)
        assert max(in_passes) <= START_SLICE_SECONDS / FIRST_GUESS_SECONDS
        for reader, _ in clients:
            await reader.readuntil(b"!")


async def test_retired_connections_end_with_their_next_answer() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        if request.path != "/early":
            begun.set()
            await go_on.wait()
        await stream.prepare(request)
        begun.set()
        await go_on.wait()
        await stream.write(b"whole")
        return stream

    async with AsyncExitStack() as stack:
        server, port = await stack.enter_async_context(server_of(answer))

        async def connected(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            return reader, writer

        go_on.set()
        idle, _ = await connected("/early")
        await idle.readuntil(b"0\r\n\r\n")
        go_on.clear()
        begun.clear()
        early, _ = await connected("/early")
        await begun.wait()
        assert b"close" not in await early.readuntil(b"\r\n\r\n")
        begun.clear()
        late, _ = await connected("/late")
        await begun.wait()
        silent, to_silent = await asyncio.open_connection("127.0.0.1", port)
        stack.callback(to_silent.close)
        while len(server._open) < 4:  # noqa: ASYNC110 - a set has no event
            await asyncio.sleep(0)

        server.retire_connections()
        assert await idle.read() == b""
        go_on.set()
        assert b"whole" in await early.read()
        new, _ = await connected("/new")
        to_silent.write(b"GET /silent HTTP/1.1\r\nHost: x\r\n\r\n")
        for reader in (late, new, silent):
            answered = await reader.read()
            assert b"Connection: close\r\n" in answered
            assert b"whole" in answered
