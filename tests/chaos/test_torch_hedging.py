"""Engines with a real model freeze while streams with a grammar, an adapter, drafts and log-probabilities run, are
moved, compared and receipted: a second copy goes on, and no bit differs from an undisturbed run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import SAMPLED, Fragile, check_log_probs, fragile_mesh
from chaos.test_everything_on import compared
from chaos.test_hedging import GENEROUS, HEDGED
from chaos.tiny_adapters import OF_SMALL, tiny_adapter
from e2e.mesh import SMALL, check_beginning, eventually, lasting, scrape
from trtmesh.client import GuidedDecodingConfig, GuideType
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTER = "small"
PROMPTS = ["def fibonacci(n):", "class Stack:"]
TOKENS = 40
"""Tokens of a sequence that are compared."""
LONG = 1000
"""Tokens of streams that the test stops."""
SCHEMA = """{"type": "object", "required": ["a"], "additionalProperties": false, "properties":
 {"a": {"type": "array", "minItems": 4000, "items": {"type": "integer"}}}}"""
GUIDED = {
    "guided_decoding": GuidedDecodingConfig(
        guide_type=GuideType.GUIDE_TYPE_JSON_SCHEMA, guide=SCHEMA
    )
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exact(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fragile]:
    receipts = tmp_path_factory.mktemp("receipts") / "receipts.jsonl"
    router = (
        *(*HEDGED, *GENEROUS, "--canary-share", "1", "--defragment", "true"),
        *("--receipts-file", str(receipts), "--receipts-requests", "true"),
    )
    flags = (
        *(*SMALL, "--torch-batch-invariant", "true"),
        *("--torch-adapters-host-bytes", str(1 << 28), "--torch-drafts", "suffix"),
        *("--torch-threads", "1"),
    )
    async with fragile_mesh(flags, router_flags=router) as fragile:
        content = tiny_adapter(1, 8, of=OF_SMALL).content
        # Only a worker that holds the adapter takes a copy.
        asked = admin_pb.AddAdapterRequest(name=ADAPTER, pinned=True)
        await fragile.mesh.admin.upload_adapter(asked, content)

        async def both_hold_it() -> bool:
            (adapter,) = (await fragile.mesh.admin.list_adapters()).adapters
            return len(adapter.workers) == 2

        await eventually(both_hold_it)
        yield fragile


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GUIDED, id="guided", marks=pytest.mark.soak),
        pytest.param(GUIDED | SAMPLED, id="guided, several"),
        pytest.param(SAMPLED | {"adapter": ADAPTER, "ignore_end_id": True}, id="adapter"),
    ],
)
async def test_second_copy_is_equal_to_the_bit(exact: Fragile, options: dict[str, Any]) -> None:
    options = {**options, "log_probs": True}
    whole = await exact.mesh.client.complete(PROMPTS, **options, max_tokens=TOKENS)
    before = await won(exact)
    reader = exact.mesh.open(PROMPTS, **options, max_tokens=LONG)
    await reader.until(lambda r: min(r.tokens(0), r.tokens(1)) > 8)
    started = reader.items[0].started
    assert started
    exact.freeze(started.worker)

    async def one_won() -> bool:
        return await won(exact) > before

    await lasting(one_won)
    here = max(max(reader.positions(index)) for index in range(len(PROMPTS)))
    items = await reader.stopped_at(max(TOKENS, here + 5), len(whole[0].sequences))
    check_beginning(items, whole)
    check_log_probs(items, whole, TOKENS)
    await exact.mend()
    await eventually(lambda: compared(exact.mesh))
    await exact.check_nothing_is_left()
    samples = await scrape(exact.mesh.router)
    assert samples["trtmesh_router_hedge_differences_total"] == 0
    for outcome in ("different", "failed", "inexact"):
        found = await scrape(exact.mesh.router, outcome=outcome)
        assert not found.get("trtmesh_router_canary_items_total")
    identical = await scrape(exact.mesh.router, outcome="identical")
    assert identical["trtmesh_router_canary_items_total"] > 0


async def won(fragile: Fragile) -> float:
    samples = await scrape(fragile.mesh.router, outcome="won")
    return samples.get("trtmesh_router_hedges_total", 0.0)
