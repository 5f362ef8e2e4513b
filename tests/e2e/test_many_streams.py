"""A thousand concurrent streams through one router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2e.mesh import SIMULATED, Mesh, StreamReader, decode, running_mesh, scrape
from trtmesh.client import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAMS = 1000
TOKENS = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh(engine_flags=(*SIMULATED, "--simulated-timing-step-ms", "250")) as mesh:
        yield mesh


async def test_thousand_requests_at_once_get_every_token(mesh: Mesh) -> None:
    prompts = [f"stream {number % 100}" for number in range(STREAMS)]
    expected = [
        (item.token_ids, item.text)
        for item in await mesh.client.complete(prompts[:100], max_tokens=TOKENS)
    ]
    assert [text for _, text in expected] == [decode(ids) for ids, _ in expected]
    readers = [StreamReader(mesh.client, [prompt], max_tokens=TOKENS) for prompt in prompts]
    results = await asyncio.gather(*(reader.result() for reader in readers))
    for number, (item,) in enumerate(results):
        assert item.error is None
        assert item.reason is FinishReason.LENGTH
        assert (item.token_ids, item.text) == expected[number % 100]
    await mesh.idle()
    samples = await scrape(mesh.router)
    assert samples["trtmesh_router_tokens_out_total"] == (STREAMS + 100) * TOKENS


async def test_thousand_prompts_of_one_request_get_every_token(mesh: Mesh) -> None:
    items = await mesh.open([f"item {n}" for n in range(STREAMS)], max_tokens=2).result()
    assert [len(item.token_ids) for item in items] == [2] * STREAMS
    assert all(item.text == decode(item.token_ids) for item in items[::50])
    await mesh.idle()
