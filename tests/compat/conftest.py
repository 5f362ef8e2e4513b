"""One mesh and one Triton client for all tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from compat.triton import Triton
from e2e.mesh import SIMULATED, WIDE_TOKENS, Mesh, running_mesh

FLAGS = (*SIMULATED, *WIDE_TOKENS, "--simulated-limits-max-sequence-tokens", "8192")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    """Models as Triton's streaming deployments have them: decoupled."""
    async with running_mesh(engine_flags=FLAGS) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def triton(mesh: Mesh) -> AsyncIterator[Triton]:
    async with Triton(mesh.router.address) as triton:
        yield triton
