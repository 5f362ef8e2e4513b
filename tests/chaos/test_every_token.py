"""An engine is lost at every token of a request, under every policy, and the client sees the same output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import (
    NAMES,
    PROMPTS,
    SAMPLED,
    TOKENS,
    Fragile,
    contents,
    fragile_mesh,
    lose,
    undisturbed,
)
from e2e.mesh import (
    ENDLESS,
    SIMULATED,
    WIDE_TOKENS,
    StreamReader,
)
from trtmesh.router.placement import POLICIES

pytestmark = pytest.mark.asyncio(loop_scope="module")

GREEDY: dict[str, Any] = {}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulated() -> AsyncIterator[Fragile]:
    slow = ("--simulated-timing-step-ms", "16")
    async with fragile_mesh((*SIMULATED, *WIDE_TOKENS, *slow)) as fragile:
        yield fragile


async def cut_at_the_end(fragile: Fragile, positions: Iterable[int], **options: Any) -> None:
    """Cuts an engine off near the end, possibly after its last token."""
    options["max_tokens"] = TOKENS
    expected = await fragile.mesh.client.complete(PROMPTS, **options)
    for position in positions:
        reader = StreamReader(fragile.mesh.client, PROMPTS, **options)
        index = position % len(PROMPTS)
        # mypy cannot infer a lambda with defaults, which bind the loop variables.
        await reader.until(lambda r, i=index, p=position: min(r.positions(i), default=0) >= p)  # type: ignore[misc]
        fragile.proxy_of(reader, index).cut()
        items = await reader.result()
        assert contents(items) == contents(expected), position
        await fragile.mend()


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param(2, id="a share"),
        pytest.param(len(POLICIES), marks=pytest.mark.soak, id="every position"),
    ],
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_engine_lost_at_any_token_goes_unnoticed(
    simulated: Fragile, policy: str, turns: int
) -> None:
    """Loses an engine at a position: the policies take turns, so that together they kill, freeze and cut at every
    position. `make soak` cuts either engine at all others too."""
    await simulated.mesh.admin.set_policy(policy)
    whole = await undisturbed(simulated, **SAMPLED)
    number = sorted(POLICIES).index(policy)
    worst: defaultdict[str, float] = defaultdict(float)
    for position in range(TOKENS):
        turn = (position - number) % len(POLICIES)
        faults = ("cut", "cut" if turns > 2 else "") if turn else ("kill", "freeze")
        for name, fault in zip(NAMES, faults[:: 1 if position % 2 else -1], strict=True):
            if fault and turn < turns:
                options = {**SAMPLED, "max_tokens": ENDLESS}
                stall = await lose(simulated, fault, name, position, whole, **options)
                worst[fault] = max(worst[fault], stall)
    for fault, seconds in worst.items():
        print(f"{policy}: worst stall after a {fault}: {seconds * 1000:.0f} ms")
    ends = [GREEDY, SAMPLED]
    for options in ends if turns > 2 else ends[number : number + 1]:
        await cut_at_the_end(simulated, range(TOKENS - 2, TOKENS + 1), **options)
    await simulated.check_nothing_is_left()


@pytest.mark.parametrize("to_target", [True, False], ids=["nothing is read", "nothing is heard"])
async def test_silent_network_moves_items(simulated: Fragile, to_target: bool) -> None:
    options = {**SAMPLED, "max_tokens": 75, "ignore_end_id": True}
    expected = contents(await simulated.mesh.client.complete(PROMPTS, **options))
    reader = StreamReader(simulated.mesh.client, PROMPTS, **options)
    await reader.until(lambda r: r.tokens() >= 8)
    frozen = simulated.proxy_of(reader, 0)
    frozen.freeze(to_target=to_target, from_target=not to_target)
    if to_target:
        # Earlier items continue there; later items are never read.
        late = StreamReader(simulated.mesh.client, PROMPTS, **options)
        assert contents(await late.result()) == expected
        print(f"worst stall of what is not read: {late.worst_gap_seconds() * 1000:.0f} ms")
    assert contents(await reader.result()) == expected
    print(f"worst stall after silence: {reader.worst_gap_seconds() * 1000:.0f} ms")
    await simulated.mend()
    await simulated.check_nothing_is_left()
