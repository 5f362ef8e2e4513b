"""Items of several sequences move between real processes: all of their sequences, and no bit changes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import NAMES, SAMPLED, SEQUENCES, Fragile, check_log_probs, fragile_mesh
from chaos.test_torch_hedging import GUIDED
from e2e.mesh import PATIENT, SIMULATED, SMALL, check_beginning, eventually, scrape
from process_constants import constants

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL = (
    *("--simulated-kv-cache-total-blocks", "400", "--simulated-kv-cache-tokens-per-block", "16"),
    *("--simulated-timing-step-ms-per-sequence", "15"),
)
TORCH = (
    *(*SMALL, "--torch-batch-invariant", "true"),
    *("--torch-kv-cache-tokens", "4096"),
    *("--torch-drafts", "suffix", "--torch-threads", "1"),
)
ENGINES = {"simulated": (*SIMULATED, *POOL), "torch": TORCH}
TOKENS = 60
"""Tokens of a sequence that are compared."""
LONG = 800
"""Tokens of streams that the test stops: so many of each sequence fit the pool."""
PROMPTS = ["def fibonacci(n):" * 12, "class Stack:" * 12]
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"num_return_sequences": 2, "ignore_end_id": True},
    "sampled": {**SAMPLED, "ignore_end_id": True},
    "guided": {**SAMPLED, **GUIDED},
}
CASES = {
    "simulated": ("rebalance sampled", "death sampled"),
    "torch": ("drain guided",),
}
SOAKED = {
    "simulated": ("rebalance greedy", "drain sampled"),
    "torch": ("drain greedy", "drain sampled"),
}
"""Those of `make soak`, which differ from one above in the verb or in the kind alone."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fragile(request: pytest.FixtureRequest) -> AsyncIterator[Fragile]:
    flags = (*PATIENT, *constants(handoff_reserve_seconds=60))
    async with fragile_mesh(ENGINES[request.param], router_flags=flags) as found:
        yield found


@pytest.mark.parametrize(
    ("fragile", "backend", "case"),
    [
        pytest.param(backend, backend, case, marks=marks)
        for marks, several in (((), CASES), (pytest.mark.soak, SOAKED))
        for backend, cases in several.items()
        for case in cases
    ],
    indirect=["fragile"],
)
async def test_all_sequences_go_on_elsewhere(fragile: Fragile, backend: str, case: str) -> None:
    verb, kind = case.split()
    options = {**KINDS[kind], "log_probs": backend == "torch"}
    mesh, (first, second) = fragile.mesh, NAMES
    expected = await mesh.client.complete(PROMPTS, **options, max_tokens=TOKENS)
    cause = "rebalance" if verb == "rebalance" else "drain"
    before = await moved(fragile, cause)
    await mesh.admin.drain_worker(second, finish_seconds=0)
    reader = mesh.open(PROMPTS, **options, max_tokens=LONG)
    await reader.until(lambda r: min(r.tokens(0), r.tokens(1)) > 20)
    await mesh.admin.resume_worker(second)
    await mesh.ready(len(NAMES))
    if verb == "rebalance":

        async def some_move() -> bool:
            moves = (await mesh.admin.rebalance_workers()).moves
            assert len(moves) % 2 == 0
            return bool(moves)

        await eventually(some_move)
    elif verb == "drain":
        drained = await mesh.admin.drain_worker(first, finish_seconds=0)
        assert drained.left_sequences == 0
    else:
        moving = asyncio.create_task(mesh.admin.drain_worker(first, finish_seconds=0))
        await eventually(lambda: has_some(fragile, cause, before))
        fragile.engines[second].signal(signal.SIGKILL)
        # With nobody else its sequences come back: they are computed again.
        await mesh.admin.resume_worker(first)
        await asyncio.gather(moving, return_exceptions=True)
    here = max(max(reader.positions(index)) for index in range(len(PROMPTS)))
    found = await reader.stopped_at(max(TOKENS, here + 5), SEQUENCES)
    check_beginning(found, expected)
    if backend == "torch":
        check_log_probs(found, expected, TOKENS)
    if verb != "death":
        assert await moved(fragile, cause) >= before + 2
    await mesh.admin.resume_worker(first)
    await fragile.mend(*([second] if verb == "death" else []))
    await fragile.check_nothing_is_left()


async def moved(fragile: Fragile, cause: str) -> float:
    """Sequences that went on elsewhere with their KV."""
    samples = await scrape(fragile.mesh.router, cause=cause, result="moved")
    return samples.get("trtmesh_router_handoffs_total", 0.0)


async def has_some(fragile: Fragile, cause: str, before: float) -> bool:
    return await moved(fragile, cause) > before
