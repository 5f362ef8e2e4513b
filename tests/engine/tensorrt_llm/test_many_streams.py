"""A thousand streams at once: the tests of other backends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2e import test_many_streams
from e2e.mesh import PATIENT, Mesh, running_mesh
from engine.tensorrt_llm.site import Site, suite_of
from engine.tensorrt_llm.stand_in.package import RELEASES

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

globals().update(
    suite_of(test_many_streams, but={"test_thousand_requests_at_once_get_every_token"})
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    site = Site(tmp_path_factory.mktemp("mesh"), RELEASES[0])

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(mesh.start_tokenizer(), site.engine(mesh, STEP_MS="50"))
        await mesh.start_router(*PATIENT)
        await mesh.ready(1, 1)

    async with running_mesh(start=start) as mesh:
        yield mesh


# Other tests have as many sequences at once of this backend, and as many requests of the router.
@pytest.mark.soak
async def test_thousand_requests_at_once_get_every_token(mesh: Mesh) -> None:
    await test_many_streams.test_thousand_requests_at_once_get_every_token(mesh)
