"""Triton's request parameter `priority` orders the queue of a torch engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from compat.triton import SyncStream
from e2e.mesh import PATIENT, SMALL, Mesh, eventually, running_mesh, scrape

pytestmark = pytest.mark.asyncio(loop_scope="module")

TENSORS = {"text_input": "def f(", "max_tokens": 3, "end_id": -1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    """Its engine computes a single sequence at a time."""
    flags = (
        *(*SMALL, "--torch-dtype", "float32", "--torch-threads", "1"),
        *("--torch-limits-max-batch-size", "1", "--load-interval-seconds", "0.02"),
    )
    async with running_mesh(engine_flags=flags, router_flags=PATIENT) as mesh:
        yield mesh
        await mesh.idle()


async def queued(mesh: Mesh, count: int) -> None:
    """Waits until the engine has `count` waiting sequences."""

    async def are_waiting() -> bool:
        samples = await scrape(mesh.engines[0])
        return samples["trtmesh_engine_waiting_sequences"] == count

    await eventually(are_waiting)


@pytest.mark.parametrize(("early", "late"), [(16, 1), (0, 1), (1000, 3), (10**6, 1000)])
async def test_later_request_of_higher_priority_starts_first(
    mesh: Mesh, early: int, late: int
) -> None:
    # The engine is busy until the end of this one.
    running = mesh.open(["def g("], max_tokens=1500, ignore_end_id=True)
    await running.tokens_here(1)
    with SyncStream(mesh.router.address) as stream:
        stream.send("ensemble", TENSORS, request_id="early", priority=early)
        await queued(mesh, 1)
        stream.send("ensemble", TENSORS, request_id="late", priority=late)
        await queued(mesh, 2)
        assert await mesh.client.stop(running.request_id) == 1
        responses = [await asyncio.to_thread(stream.next) for _ in range(2)]
    assert [response.request_id for response in responses] == ["late", "early"]
    assert not any(response.error for response in responses)
