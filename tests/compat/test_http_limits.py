"""Limits of the HTTP door: endless bodies and heads, slow senders, compressed bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from compat.plain_http import PlainHttp
from processes import service_process
from trtmesh.router.doors.http.port import MAX_UNFINISHED_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY_BYTES = 4096
PATH = "/v2/models/ensemble/generate"
NOT_READY = 503
"""The status of a request after its head: the router has no worker."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[PlainHttp]:
    async with router_with("--max-message-bytes", str(BODY_BYTES)) as http:
        yield http


@asynccontextmanager
async def router_with(*limits: str) -> AsyncIterator[PlainHttp]:
    flags = ("--port", "0", "--engines", "127.0.0.1:1", *limits)
    async with service_process("router", *flags) as router, PlainHttp(router.http_address) as http:
        yield http


def body(size: int) -> bytes:
    """A request of `size` bytes."""
    empty = len(json.dumps({"text_input": "", "max_tokens": 3}))
    return json.dumps({"text_input": "x" * (size - empty), "max_tokens": 3}).encode()


async def test_router_without_workers_is_live_but_not_ready(http: PlainHttp) -> None:
    for path, status in (
        ("/v2/health/live", 200),
        ("/v2/health/ready", 400),
        ("/v2/models/ensemble/ready", 400),
    ):
        reply = await http.get(path)
        assert (reply.status, reply.body) == (status, b"")
    reply = await http.post(PATH, body(100))
    assert reply.status == NOT_READY
    assert int(reply.headers["Retry-After"]) >= 1
    assert reply.headers["trtmesh-error-reason"] == "NO_WORKER"


async def test_body_size_is_limited(http: PlainHttp) -> None:
    assert (await http.post(PATH, body(BODY_BYTES))).status == NOT_READY
    reply = await http.post(PATH, body(BODY_BYTES + 1))
    assert reply.status == 413
    assert reply.json == {
        "error": f"the body of the request has more than {BODY_BYTES} bytes (max_message_bytes)"
    }


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_decompressed_size_is_limited(
    http: PlainHttp, encoding: str, compress: object
) -> None:
    assert callable(compress)
    headers = {"Content-Encoding": encoding}
    reply = await http.post(PATH, compress(body(BODY_BYTES)), headers=headers)
    assert reply.status == NOT_READY
    bomb = compress(b" " * 2**26)
    assert len(bomb) < 2**17
    for large in (compress(body(BODY_BYTES + 1)), bomb):
        assert (await http.post(PATH, large, headers=headers)).status == 413


async def test_other_encodings_are_refused(http: PlainHttp) -> None:
    reply = await http.post(PATH, body(100), headers={"Content-Encoding": "br"})
    assert reply.status == 501
    assert reply.json["error"].startswith("Unsupported compression type 'br'")
    whole = gzip.compress(body(100))
    for broken in (b"no gzip at all", whole[:-9], whole + b"more", b""):
        reply = await http.post(PATH, broken, headers={"Content-Encoding": "gzip"})
        assert reply.status == 400
        assert "compressed" in reply.json["error"]


async def raw(http: PlainHttp, *parts: bytes) -> bytes:
    """The bytes of the door's answer, up to the end of the connection."""
    host, _, port = http.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        async with asyncio.timeout(60):
            return await reader.read()
    finally:
        writer.close()


HEAD = f"POST {PATH} HTTP/1.1\r\nHost: x\r\n".encode()


async def test_bodies_together_are_limited() -> None:
    """The largest gives way; what comes after it is served. One that never fits is too large."""
    async with router_with("--max-message-bytes", str(2 * MAX_UNFINISHED_BYTES)) as http:
        length = b"Content-Length: %d\r\nConnection: close\r\n\r\n"
        answer = await raw(http, HEAD + length % (MAX_UNFINISHED_BYTES + 1))
        assert answer.startswith(b"HTTP/1.1 413 Request Entity Too Large\r\n")
        assert b"(of all requests that are received)" in answer
        assert b"Retry-After" not in answer
        head = HEAD + length % MAX_UNFINISHED_BYTES
        share = MAX_UNFINISHED_BYTES // 8
        large = asyncio.create_task(raw(http, head, bytes(7 * share)))
        others = [asyncio.create_task(raw(http, head, bytes(share))) for _ in range(2)]
        answer = await large
        for other in others:
            other.cancel()
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"\r\ntrtmesh-error-reason: EXHAUSTED\r\n" in answer
        assert b"\r\nRetry-After: 1\r\n" in answer
        assert (await http.post(PATH, body(2**19))).status == NOT_READY


async def test_endless_head_is_cut_off(http: PlainHttp) -> None:
    answer = await raw(http, HEAD + b"X-Long: " + b"x" * 10_000 + b"\r\n\r\n")
    assert b" 400 Bad Request\r\n" in answer
    many = b"".join(b"X-%d: x\r\n" % number for number in range(1000))
    answer = await raw(http, HEAD + many + b"\r\n")
    assert b" 400 Bad Request\r\n" in answer


async def test_unknown_paths_and_methods_are_refused(http: PlainHttp) -> None:
    for path in (
        "/v2/",
        "/v2/nothing",
        "/v2/models/a/b",
        "/v2/models/ensemble/versions/x/infer",
    ):
        reply = await http.get(path)
        assert (reply.status, reply.json) == (404, {"error": "Not Found"})
    for method, path in (
        ("GET", PATH),
        ("POST", "/v2/health/live"),
        ("DELETE", "/v2/models/ensemble"),
    ):
        reply = await http.call(method, path)
        assert (reply.status, reply.json) == (405, {"error": "Method Not Allowed"})
        assert reply.headers["Allow"]
    for path in ("/v2/systemsharedmemory/status", "/v2/repository/models/ensemble/load"):
        reply = await http.post(path, {})
        assert reply.status == 501
        assert reply.json["error"].startswith("this server does not serve")
