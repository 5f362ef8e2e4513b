"""Placement by the library's own events of its cache: the tests of other backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2e import test_placement
from e2e.mesh import Mesh, running_mesh
from engine.tensorrt_llm.site import Site, suite_of
from engine.tensorrt_llm.stand_in.package import RELEASES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

globals().update(suite_of(test_placement))

other = test_placement.other


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    """Of one release: test_kv_events.py has the events of each."""
    site = Site(tmp_path_factory.mktemp("mesh"), RELEASES[-1])

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(*(site.engine(mesh) for _ in range(3)))
        await mesh.start_router(*test_placement.FLAGS)
        await mesh.ready(3)

    async with running_mesh(start=start) as mesh:
        yield mesh
