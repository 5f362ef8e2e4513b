"""HTTP clients with unread streams: nothing of theirs is left, and nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from compat.conftest import FLAGS
from compat.plain_http import PlainHttp
from e2e.mesh import PATIENT, Mesh, eventually, running_mesh, scrape
from process_constants import constants
from processes import ServiceProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = 128
"""This many sequences fill the buffers of a connection within seconds."""
TRITON, OPENAI = "/v2/models/ensemble/generate_stream", "/v1/completions"
BODIES = {
    TRITON: {
        "text_input": ["x"] * ROWS,
        "max_tokens": [8000] * ROWS,
        "stream": [True] * ROWS,
    },
    OPENAI: {
        "prompt": ["x"] * ROWS,
        "max_tokens": 8000,
        "stream": True,
        "ignore_eos": True,
    },
}
"""By path."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh(engine_flags=FLAGS, router_flags=PATIENT) as mesh:
        yield mesh


@asynccontextmanager
async def client_that_does_not_read(address: str, path: str) -> AsyncIterator[socket.socket]:
    body = json.dumps(BODIES[path]).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, _, port = address.rpartition(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, head.encode() + body)
        yield client


async def start_router(mesh: Mesh, *flags: str) -> ServiceProcess:
    """A second, ready router over the engines of the mesh."""
    peers = ("--engines", mesh.engines[0].address, "--tokenizers", mesh.tokenizers[0].address)
    router = await mesh.start("router", "--port", "0", *peers, *PATIENT, *flags)
    async with PlainHttp(router.http_address) as http:

        async def ready() -> bool:
            return (await http.get("/v2/health/ready")).status == 200

        await eventually(ready)
    return router


async def stuck(router: ServiceProcess) -> bool:
    """Whether streams are paused for a slow client."""
    return (await scrape(router))["trtmesh_router_paused_requests"] == 1


@pytest.mark.parametrize("path", [TRITON, pytest.param(OPENAI, marks=pytest.mark.soak)])
async def test_slow_client_is_cut_off(mesh: Mesh, path: str) -> None:
    router = await start_router(mesh, *constants(client_unread_seconds=0.5))
    tasks = (await scrape(router))["trtmesh_tasks"]
    async with client_that_does_not_read(router.http_address, path):

        async def cut_off() -> bool:
            samples = await scrape(router, action="cancelled")
            return samples.get("trtmesh_router_slow_clients_total") == 1

        async def nothing_left() -> bool:
            samples = await scrape(router)
            return not samples["trtmesh_router_live_items"] and samples["trtmesh_tasks"] <= tasks

        await eventually(cut_off)
        await eventually(nothing_left)
        await mesh.idle()
    assert await router.stop() == 0
    assert "Traceback" not in router.stderr


@pytest.mark.parametrize("path", [OPENAI, pytest.param(TRITON, marks=pytest.mark.soak)])
async def test_stopping_router_does_not_wait_for_a_slow_client(mesh: Mesh, path: str) -> None:
    router = await start_router(mesh, "--grace-seconds", "0.1", *constants(buffer_tokens=1000))
    async with client_that_does_not_read(router.http_address, path):
        await eventually(lambda: stuck(router))
        assert await router.stop() == 0
        assert "Traceback" not in router.stderr
    await mesh.idle()
