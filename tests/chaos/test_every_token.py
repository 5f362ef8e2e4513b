"""An engine is lost at every token of a four-prompt request, under every policy, and the client does not notice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import Fragile, contents, fragile_mesh, log_probs
from e2e.mesh import DEMO, SIMULATED, WIDE_TOKENS, StreamReader
from trtmesh.router.placement import POLICIES

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [f"the {number}. prompt begins like the others" for number in range(4)]
TOKENS = 14
GREEDY: dict[str, Any] = {"max_tokens": TOKENS}
SAMPLED: dict[str, Any] = {
    "max_tokens": TOKENS,
    "temperature": 0.9,
    "seed": 11,
    "num_return_sequences": 2,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulated() -> AsyncIterator[Fragile]:
    async with fragile_mesh((*SIMULATED, *WIDE_TOKENS)) as fragile:
        yield fragile


def reached(position: int) -> Any:
    """Whether one of the items, another one each time, got to a position."""
    return lambda reader: reader.tokens(position % len(PROMPTS)) >= position


async def lose_at_every_token(fragile: Fragile, stride: int = 1, **options: Any) -> float:
    """Cuts an engine off at each position in turn, or at every so many; the longest time that an item was without an
    event."""
    undisturbed = await fragile.mesh.client.complete(PROMPTS, **options)
    # Equal up to how kernels round for another batch.
    sums = pytest.approx(log_probs(undisturbed), abs=1e-2)
    worst = 0.0
    for position in range(0, options["max_tokens"] + 1, stride):
        reader = StreamReader(fragile.mesh.client, PROMPTS, **options)
        await reader.until(reached(position))
        fragile.proxy_of(reader, position % len(PROMPTS)).cut()
        items = await reader.result()
        assert contents(items) == contents(undisturbed), position
        assert log_probs(items) == sums, position
        worst = max(worst, reader.worst_gap_seconds())
        await fragile.mend()
    await fragile.check_nothing_is_left()
    return worst


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_an_engine_is_cut_off(simulated: Fragile, policy: str) -> None:
    await simulated.mesh.admin.set_policy(policy)
    worst = await lose_at_every_token(simulated, **GREEDY)
    worst = max(worst, await lose_at_every_token(simulated, **SAMPLED))
    print(f"{policy}: worst stall after a closed connection: {worst * 1000:.0f} ms")


@pytest.mark.parametrize("to_target", [True, False], ids=["nothing is read", "nothing is heard"])
async def test_the_network_goes_silent(simulated: Fragile, to_target: bool) -> None:
    options = {**SAMPLED, "max_tokens": 600, "ignore_end_id": True}
    expected = contents(await simulated.mesh.client.complete(PROMPTS, **options))
    reader = StreamReader(simulated.mesh.client, PROMPTS, **options)
    await reader.until(reached(8))
    frozen = simulated.proxy_of(reader, 0)
    frozen.freeze(to_target=to_target, from_target=not to_target)
    if to_target:
        # What was sent before it went silent goes on; what comes later is never read.
        late = StreamReader(simulated.mesh.client, PROMPTS, **options)
        assert contents(await late.result()) == expected
        print(f"worst stall of what is not read: {late.worst_gap_seconds() * 1000:.0f} ms")
    assert contents(await reader.result()) == expected
    print(f"worst stall after silence: {reader.worst_gap_seconds() * 1000:.0f} ms")
    await simulated.mend()
    await simulated.check_nothing_is_left()


async def test_a_model_is_cut_off() -> None:
    """The same with a real model, log-probabilities included."""
    async with fragile_mesh(("--backend", "torch", "--model-dir", str(DEMO))) as torch:
        worst = await lose_at_every_token(torch, stride=6, **SAMPLED, log_probs=True)
        print(f"torch: worst stall after a closed connection: {worst * 1000:.0f} ms")
