"""Bodies that are compressed, and answers in the coding that a client prefers."""

from __future__ import annotations

import gzip
import io
import math
import os
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.doors.triton.http.bodies import (
    COMPRESSED_PIECE,
    PIECE_ELEMENTS,
    Bodies,
    BodyLimits,
    to_json,
    to_json_in_pieces,
)
from trtmesh.router.doors.triton.http.inference import coding_of

MOST_BYTES = 64 * 2**20
MOST_UNFINISHED = 8 * 2**20


@pytest_asyncio.fixture
async def address() -> AsyncIterator[str]:
    """A server that answers with the length of each body, or the error."""
    bodies = Bodies(BodyLimits(MOST_BYTES, MOST_BYTES, MOST_UNFINISHED, 60.0))

    async def measure(request: web.Request) -> web.Response:
        try:
            async with bodies.of(request, MOST_BYTES) as body:
                return web.Response(text=f"{len(body)} {zlib.crc32(body)}")
        except TrtmeshError as error:
            return web.Response(text=error.reason)
        finally:
            assert not bodies.unfinished_bytes

    async def choose(request: web.Request) -> web.Response:
        return web.Response(text=str(coding_of(request)))

    app = web.Application(client_max_size=MOST_BYTES)
    app.add_routes([web.post("/", measure), web.get("/", choose)])
    server = TestServer(app)
    await server.start_server(auto_decompress=False)
    yield str(server.make_url("/"))
    await server.close()


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
        assert to_json_in_pieces(each) == to_json(each)


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
async def test_client_chooses_the_coding(address: str, accepted: list[str], coding: str) -> None:
    headers = [("accept-encoding", each) for each in accepted]
    async with (
        aiohttp.ClientSession(skip_auto_headers=["accept-encoding"]) as client,
        client.get(address, headers=headers) as response,
    ):
        assert await response.text() == coding
