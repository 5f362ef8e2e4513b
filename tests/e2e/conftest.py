"""One mesh for the tests of a module, and options."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2e.mesh import PATIENT, SIMULATED, WIDE_TOKENS, Mesh, running_mesh


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds options for command lines with this folder or a file in it."""
    parser.addoption("--before", help="revision that makes the receipts of test_releases")
    parser.addoption("--receipts", help="receipts of test_releases")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    """A tokenizer, and two engines whose tokens span the demo vocabulary."""
    flags = (*SIMULATED, *WIDE_TOKENS, "--simulated-limits-max-sequence-tokens", "8192")
    async with running_mesh(engines=2, engine_flags=flags, router_flags=PATIENT) as mesh:
        yield mesh
