"""gRPC's interop cases by grpc-js."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from compat_clients.environments import NodeClient, run
from conformance.interop_service import interop_server
from conformance.test_interop import CASES

pytestmark = pytest.mark.clients


@pytest_asyncio.fixture
async def address() -> AsyncIterator[str]:
    async with interop_server() as address:
        yield address


@pytest.mark.parametrize("case", CASES)
async def test_grpc_js(address: str, case: str) -> None:
    await run(NodeClient(script="interop.js"), case, address)
