"""An engine is lost at every token of a request, under every policy, and the client sees the same output."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import NAMES, Fragile, contents, fragile_mesh
from e2e.mesh import (
    DEMO,
    ENDLESS,
    SIMULATED,
    WIDE_TOKENS,
    StreamReader,
    check_beginning,
)
from trtmesh.client import ItemResult
from trtmesh.router.placement import POLICIES

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = [f"the {number}. prompt begins like the others" for number in range(4)]
TOKENS = 14
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "num_return_sequences": 2}
SEQUENCES = 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulated() -> AsyncIterator[Fragile]:
    async with fragile_mesh((*SIMULATED, *WIDE_TOKENS)) as fragile:
        yield fragile


async def lose(
    fragile: Fragile,
    fault: str,
    name: str,
    position: int,
    whole: Sequence[ItemResult],
    **options: Any,
) -> float:
    """Loses the named engine, or the other one if the policy placed every item there, once all of its sequences have
    `position` tokens; checks that each of them migrates. Returns the longest gap between two events of an item."""
    before = await fragile.moved_sequences()
    reader = StreamReader(fragile.mesh.client, PROMPTS, **options, ignore_end_id=True)

    def chosen(reader: StreamReader) -> str:
        """The engine to lose; '' while unknown."""
        if fragile.begun_on(reader, name):
            return name
        (other,) = set(NAMES) - {name}
        return other if all(item.started for item in reader.items) else ""

    def reached(reader: StreamReader) -> bool:
        if position == 0:
            return bool(chosen(reader))
        return all(item.started for item in reader.items) and all(
            len(reader.positions(index)) == SEQUENCES and min(reader.positions(index)) >= position
            for index in fragile.begun_on(reader, chosen(reader))
        )

    try:
        await reader.until(reached)
        victim = chosen(reader)
        lost = fragile.begun_on(reader, victim)
        getattr(fragile, fault)(victim)
        await fragile.mesh.counted("moved_sequences", before + SEQUENCES * len(lost))
        items = await reader.stopped_at(TOKENS, SEQUENCES)
    finally:
        await reader.cancel()
    check_beginning(items, whole)
    # Kernels round differently in another batch.
    assert log_probs_of(items) == pytest.approx(log_probs_of(whole), abs=1e-2)
    await fragile.mend(*[victim] * (fault == "kill"))
    return reader.worst_gap_seconds()


def log_probs_of(items: Sequence[ItemResult]) -> list[float]:
    """The log-probabilities of the first tokens of every sequence."""
    return [
        value
        for item in items
        for sequence in item.sequences
        for value in [
            value
            for chunk in sequence.chunks
            if chunk.details is not None
            for value in chunk.details.log_probs
        ][:TOKENS]
    ]


async def undisturbed(fragile: Fragile, **options: Any) -> Sequence[ItemResult]:
    """The first tokens of the items without a fault."""
    return await fragile.mesh.client.complete(
        PROMPTS, **options, max_tokens=TOKENS, ignore_end_id=True
    )


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


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_engine_lost_at_any_token_goes_unnoticed(simulated: Fragile, policy: str) -> None:
    """Loses either engine at every position: kills and freezes at every fifth one, which differs by policy, and cuts at
    the others."""
    await simulated.mesh.admin.set_policy(policy)
    whole = await undisturbed(simulated, **SAMPLED)
    worst: defaultdict[str, float] = defaultdict(float)
    for position in range(TOKENS):
        special = position % len(POLICIES) == sorted(POLICIES).index(policy)
        faults = ("kill", "freeze") if special else ("cut", "cut")
        for name, fault in zip(NAMES, faults[:: 1 if position % 2 else -1], strict=True):
            options = {**SAMPLED, "max_tokens": ENDLESS}
            stall = await lose(simulated, fault, name, position, whole, **options)
            worst[fault] = max(worst[fault], stall)
    for fault, seconds in worst.items():
        print(f"{policy}: worst stall after a {fault}: {seconds * 1000:.0f} ms")
    for options in (GREEDY, SAMPLED):
        await cut_at_the_end(simulated, range(TOKENS - 2, TOKENS + 1), **options)
    await simulated.check_nothing_is_left()


@pytest.mark.parametrize("to_target", [True, False], ids=["nothing is read", "nothing is heard"])
async def test_silent_network_moves_items(simulated: Fragile, to_target: bool) -> None:
    options = {**SAMPLED, "max_tokens": 600, "ignore_end_id": True}
    expected = contents(await simulated.mesh.client.complete(PROMPTS, **options))
    reader = StreamReader(simulated.mesh.client, PROMPTS, **options)
    await reader.until(lambda r: r.tokens() >= 8)
    frozen = simulated.proxy_of(reader, 0)
    frozen.freeze(to_target=to_target, from_target=not to_target)
    if to_target:
        # Earlier items continue there; later ones are never read.
        late = StreamReader(simulated.mesh.client, PROMPTS, **options)
        assert contents(await late.result()) == expected
        print(f"worst stall of what is not read: {late.worst_gap_seconds() * 1000:.0f} ms")
    assert contents(await reader.result()) == expected
    print(f"worst stall after silence: {reader.worst_gap_seconds() * 1000:.0f} ms")
    await simulated.mend()
    await simulated.check_nothing_is_left()


async def test_torch_engine_cut_off_moves_items_with_their_log_probs() -> None:
    """The same with a real model and log-probabilities."""
    options = {**SAMPLED, "log_probs": True}
    async with fragile_mesh(("--backend", "torch", "--model-dir", str(DEMO))) as torch:
        whole = await undisturbed(torch, **options)
        for policy, position, name in (("auto", 3, NAMES[0]), ("round_robin", 9, NAMES[1])):
            await torch.mesh.admin.set_policy(policy)
            worst = await lose(torch, "cut", name, position, whole, **options, max_tokens=400)
            print(f"torch, {policy}: worst stall after a cut: {worst * 1000:.0f} ms")
        await torch.check_nothing_is_left()
