"""One engine and one tokenizer for all tests, and a router and a Triton client for those of a module.

A test that kills, freezes or drains a worker, or needs one with other flags, has a mesh of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio
from compat.plain_http import PlainHttp
from compat.triton import Triton
from e2e.mesh import SIMULATED, WIDE_TOKENS, Mesh, eventually, router_before, running_mesh

FLAGS = (
    *(*SIMULATED, *WIDE_TOKENS, "--simulated-limits-max-sequence-tokens", "8192"),
    # It idles until the end of the session.
    *("--load-interval-seconds", "0.1"),
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def workers() -> AsyncIterator[Mesh]:
    """A tokenizer and a simulated engine, without a router."""

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(mesh.start_tokenizer(), mesh.start_engine(*FLAGS))

    async with running_mesh(start=start) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(workers: Mesh) -> AsyncIterator[Mesh]:
    """Models as Triton's streaming deployments have them: decoupled."""
    async with router_before(workers) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def triton(mesh: Mesh) -> AsyncIterator[Triton]:
    async with Triton(mesh.router.address) as triton:
        yield triton


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(mesh: Mesh) -> AsyncIterator[PlainHttp]:
    async with PlainHttp(mesh.router.http_address) as http:
        await eventually(http.is_ready)
        yield http
