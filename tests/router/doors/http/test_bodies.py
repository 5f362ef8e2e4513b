"""Bodies that are compressed, and answers in the coding that a client prefers."""

from __future__ import annotations

import asyncio
import gzip
import io
import math
import os
import random
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.fair.limits import Budget
from trtmesh.chassis.fair.messages import LARGE_BYTES, MessageAdmission
from trtmesh.chassis.fair.turns import MAX_IN_SLICE
from trtmesh.chassis.http_server import HttpLimits, HttpServer
from trtmesh.router.doors.http.answers import PIECE_ELEMENTS, coding_of, to_json
from trtmesh.router.doors.http.bodies import COMPRESSED_PIECE, Bodies, Body, BodyLimits
from yarl import URL

MOST_BYTES = 64 * 2**20
MOST_UNFINISHED = 8 * 2**20
MANY = 60


@dataclass
class Measuring:
    """A server of bodies."""

    address: str
    budget: Budget


Handler = Callable[[web.Request, Bodies], Awaitable[web.Response]]


@asynccontextmanager
async def serving(handler: Handler, receive_seconds: float = 60.0) -> AsyncIterator[Measuring]:
    app = web.Application(client_max_size=MOST_BYTES)
    server = HttpServer(app, HttpLimits(64, 64, MOST_UNFINISHED, 60.0, 60.0))
    bodies = Bodies(BodyLimits(MOST_BYTES, MOST_BYTES, receive_seconds), server, MessageAdmission())

    async def handle(request: web.Request) -> web.Response:
        return await handler(request, bodies)

    app.router.add_route("*", "/", handle)
    _, port = server.listen("127.0.0.1", 0, "test")
    await server.open()
    try:
        yield Measuring(f"http://127.0.0.1:{port}/", server.budget)
    finally:
        await server.close()
    assert server.budget.held == 0


async def measure(request: web.Request, bodies: Bodies) -> web.Response:
    try:
        async with bodies.of(request, MOST_BYTES) as body:
            return web.Response(text=f"{len(body)} {zlib.crc32(body)}")
    except TrtmeshError as error:
        return web.Response(text=error.reason)


async def choose(request: web.Request, _: Bodies) -> web.Response:
    return web.Response(text=str(coding_of(request)))


@pytest_asyncio.fixture
async def measuring() -> AsyncIterator[Measuring]:
    async with serving(measure) as measuring:
        yield measuring


@pytest.fixture
def address(measuring: Measuring) -> str:
    return measuring.address


async def sent(address: str, body: bytes) -> str:
    headers = {"content-encoding": "gzip"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(address, data=io.BytesIO(body), headers=headers) as response,
    ):
        return await response.text()


@pytest.mark.parametrize(
    "body",
    [b"", b"x", bytes(3 * 2**20), os.urandom(3 * COMPRESSED_PIECE), os.urandom(99) * 20_000],
    ids=["empty", "short", "zeros", "random", "repeated"],
)
async def test_compressed_body_arrives_whole(address: str, body: bytes) -> None:
    whole = gzip.compress(body)
    assert await sent(address, whole) == f"{len(body)} {zlib.crc32(body)}"
    for broken in (whole[:-1], whole + b"x", whole + bytes(2 * COMPRESSED_PIECE), b"x" * 99):
        assert await sent(address, broken) == "INVALID_REQUEST"


async def test_bomb_is_counted_while_it_is_inflated(address: str) -> None:
    bomb = gzip.compress(bytes(MOST_BYTES))
    tracemalloc.start()
    try:
        assert await sent(address, bomb) == "EXHAUSTED"
        assert tracemalloc.get_traced_memory()[1] < 4 * MOST_UNFINISHED
    finally:
        tracemalloc.stop()


async def test_a_body_must_arrive_in_time() -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(60)

    async with (
        serving(measure, receive_seconds=0.3) as on,
        aiohttp.ClientSession() as client,
        client.post(on.address, data=stalled()) as response,
    ):
        assert response.status == 408
        assert "did not come within 0.3 s" in await response.text()


@pytest.mark.parametrize("compression", [None, "gzip"])
async def test_a_body_in_parts_of_any_size_arrives_whole(compression: str | None) -> None:
    """In an object, and in a mapping."""
    dice = random.Random(7)
    got = list[Body]()

    async def take(request: web.Request, bodies: Bodies) -> web.Response:
        async with bodies.of(request, MOST_BYTES) as body:
            got.append(body)
        return web.Response()

    async with serving(take) as server, aiohttp.ClientSession() as client:
        for most in (3, 1000, 100_000):
            parts = [dice.randbytes(dice.randrange(1, most)) for _ in range(40)]
            whole = b"".join(parts)
            sent = [gzip.compress(whole)] if compression else parts

            async def stream(sent: list[bytes] = sent) -> AsyncIterator[bytes]:
                for part in sent:
                    yield part
                    await asyncio.sleep(0)

            headers = {"Content-Encoding": compression} if compression else {}
            async with client.post(server.address, data=stream(), headers=headers) as answer:
                assert answer.status == 200
            assert got.pop() == whole


async def test_few_of_many_late_bodies_are_used_in_a_pass() -> None:
    """Their requests have begun long ago, in turns."""
    used = list[Body]()

    async def use(request: web.Request, bodies: Bodies) -> web.Response:
        async with bodies.of(request, MOST_BYTES) as body:
            used.append(body)
        return web.Response()

    async with serving(use) as server, AsyncExitStack() as stack:
        writers = []
        for _ in range(MANY):
            _, writer = await stack.enter_async_context(unfinished(server.address, 1000, 1001))
            writers.append(writer)
        await until_held(server.budget, MANY * 1000)
        for writer in writers:
            writer.write(b"x")
        in_passes = []
        while len(used) < MANY:
            before = len(used)
            await asyncio.sleep(0)
            in_passes.append(len(used) - before)
        assert max(in_passes) <= MAX_IN_SLICE


async def until_held(budget: Budget, size: int) -> None:
    async with asyncio.timeout(60):
        while budget.held < size:  # noqa: ASYNC110 - a sum sets no event
            await asyncio.sleep(0.01)


async def test_the_largest_body_gives_way(measuring: Measuring) -> None:
    """Whoever sends the most of what does not end keeps nobody out."""
    address, budget = measuring.address, measuring.budget
    large, small = 5 * 2**20, 2 * 2**20
    async with (
        unfinished(address, large, MOST_UNFINISHED) as (largest, _),
        unfinished(address, small, MOST_UNFINISHED) as (other, _),
    ):
        await until_held(budget, large + small)
        whole = os.urandom(2 * 2**20)
        assert await sent(address, gzip.compress(whole)) == f"{len(whole)} {zlib.crc32(whole)}"
        async with asyncio.timeout(60):
            assert b"EXHAUSTED" in await largest.read()
        assert budget.held == small
        assert not other.at_eof()


@asynccontextmanager
async def unfinished(
    address: str, sent: int, size: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """The connection of a body, of which so much was sent."""
    url = URL(address)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % size + bytes(sent))
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()


@pytest.mark.parametrize(
    "length", [0, 1, 2, PIECE_ELEMENTS, PIECE_ELEMENTS + 1, 3 * PIECE_ELEMENTS]
)
def test_pieces_of_json_are_the_whole(length: int) -> None:
    numbers = [0.1 * number for number in range(length)]
    value = {
        "é": numbers,
        "nested": [{"data": list(range(length)), "none": None}, [numbers, ["x"] * length], "y"],
        "infinite": [math.inf, math.nan],
        "empty": {"a": {}, "b": [], "c": [[]], "d": ""},
    }
    for each in (value, numbers, {}, [], "x", [[1], 2, {"a": 1}]):
        assert to_json(each, LARGE_BYTES) == to_json(each)


@pytest.mark.parametrize(
    ("accepted", "coding"),
    [
        ([], "None"),
        (["gzip"], "ContentCoding.gzip"),
        (["GZIP ; Q=0.5"], "ContentCoding.gzip"),
        (["gzip; q=0"], "None"),
        (["gzip;q=0.5, identity"], "None"),
        (["gzip; q=0.2, deflate; q=0.7, identity; q=0.1"], "ContentCoding.deflate"),
        (["identity;q=0.5", "gzip;q=0.6"], "ContentCoding.gzip"),
        (["br, gzip;q=x, nonsense;;=,"], "None"),
    ],
)
async def test_client_chooses_the_coding(accepted: list[str], coding: str) -> None:
    headers = [("accept-encoding", each) for each in accepted]
    async with (
        serving(choose) as choosing,
        aiohttp.ClientSession(skip_auto_headers=["accept-encoding"]) as client,
        client.get(choosing.address, headers=headers) as response,
    ):
        assert await response.text() == coding
