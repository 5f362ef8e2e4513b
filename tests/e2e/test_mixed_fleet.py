"""Placement over workers with different limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2e.mesh import PATIENT, SIMULATED, Mesh, running_mesh
from trtmesh.chassis.errors import InvalidField

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    """An engine for single sequences, and one for several."""

    async def start(mesh: Mesh) -> None:
        for name, most in (("one", 1), ("several", MOST)):
            limit = ("--simulated-limits-max-sequences-per-item", str(most))
            await mesh.start_engine(*SIMULATED, *limit, "--worker", name)
        await mesh.start_router(*PATIENT, "--placement-policy", "round_robin")
        await mesh.ready(2)

    async with running_mesh(start=start) as mesh:
        yield mesh


async def test_item_goes_to_a_worker_that_takes_its_sequences(mesh: Mesh) -> None:
    async def ask() -> str:
        (item,) = await mesh.client.complete(
            [[7, 8]], max_tokens=3, text=False, num_return_sequences=MOST, top_k=9
        )
        assert item.error is None
        assert item.started
        return item.started.worker

    assert set(await asyncio.gather(*(ask() for _ in range(6)))) == {"several"}


async def test_item_with_more_sequences_than_any_worker_takes_is_refused(mesh: Mesh) -> None:
    (item,) = await mesh.client.complete(
        [[7, 8]], max_tokens=3, text=False, num_return_sequences=MOST + 1, top_k=9
    )
    assert isinstance(item.error, InvalidField)
    assert item.error.field == "sampling.num_return_sequences"
    assert str(MOST) in (item.error.limit or "")
