"""Engines with a real model are killed while streams with an adapter and drafts run: no bit differs from an undisturbed
run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import NAMES, SAMPLED, Fragile, check_log_probs, contents, fragile_mesh
from chaos.tiny_adapters import OF_SMALL, tiny_adapter
from e2e.mesh import PATIENT, SMALL, check_beginning
from trtmesh.client import ItemResult
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADAPTER = "small"
PROMPT = ["def fibonacci(n):"]
TOKENS = 30
"""Tokens of a sequence that are compared."""
BEFORE_THE_LOSS = 12
LONG = 1000
"""Tokens of a stream that the test stops."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def exact() -> AsyncIterator[Fragile]:
    flags = (
        *(*SMALL, "--torch-threads", "1", "--torch-batch-invariant", "true"),
        *("--torch-adapters-host-bytes", str(1 << 28), "--torch-drafts", "suffix"),
    )
    # A slow moment moves nothing.
    async with fragile_mesh(flags, router_flags=PATIENT) as fragile:
        content = tiny_adapter(1, 8, of=OF_SMALL).content
        await fragile.mesh.admin.upload_adapter(admin_pb.AddAdapterRequest(name=ADAPTER), content)
        yield fragile


async def undisturbed(fragile: Fragile, **options: Any) -> ItemResult:
    (item,) = await fragile.mesh.client.complete(PROMPT, **options)
    assert item.error is None
    return item


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.soak, id="greedy"), pytest.param(SAMPLED, id="sampled")],
)
async def test_killed_engine_moves_streams_with_an_adapter(
    exact: Fragile, options: dict[str, Any]
) -> None:
    options = {**options, "ignore_end_id": True, "log_probs": True}
    base = await undisturbed(exact, **options, max_tokens=TOKENS)
    options["adapter"] = ADAPTER
    whole = await undisturbed(exact, **options, max_tokens=TOKENS)
    assert contents([whole]) != contents([base])
    moved = await exact.moved_sequences()
    reader = exact.mesh.open(PROMPT, **options, max_tokens=LONG)
    await reader.tokens_here(BEFORE_THE_LOSS)
    (victim,) = [name for name in NAMES if exact.begun_on(reader, name)]
    exact.kill(victim)
    sequences = len(whole.sequences)
    await exact.mesh.counted("moved_sequences", moved + sequences)
    items = await reader.stopped_at(max(TOKENS, max(reader.positions(0)) + 5), sequences)
    assert await exact.moved_sequences() == moved + sequences
    check_beginning(items, [whole])
    check_log_probs(items, [whole], TOKENS)
    await exact.mend(victim)
    await exact.check_nothing_is_left()
