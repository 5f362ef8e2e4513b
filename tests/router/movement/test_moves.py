"""Streams move to better places with their KV, and no token changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import pytest_asyncio
from router.handoff_fleet import PROMPT, Workers, workers
from router.scripted import PATIENCE_SECONDS, eventually
from trtmesh.router.handoffs.live_handoff import LiveHandoff
from trtmesh.router.movement import movement, streams
from trtmesh.router.movement.streams import Scene
from trtmesh.router.requests.item import ItemRun
from trtmesh.v1 import router_admin_pb2 as admin_pb

STREAMS = 6
PROMPTS = [list(range(start, start + 40)) for start in range(100, 100 + 500 * STREAMS, 500)]
BLOCK = 4
SMALL_POOL: dict[str, Any] = {
    "kv_cache": {"total_blocks": 304, "tokens_per_block": BLOCK},
    # Few tokens take as long as a move.
    "timing": {"step_ms": 20.0},
}
TOKENS = 150
SLOW_MS = 100.0
"""With these steps no stream ends before its move does."""


async def learned(on: Workers) -> None:
    """Lets the router see how long streams are."""
    await on.ask([1, 2, 3], max_tokens=TOKENS)
    fleet = on.client.router._fleet
    await eventually(lambda: fleet.typical("simulated").new_tokens > TOKENS / 2)


async def crowded(
    on: Workers, prompts: Sequence[Any] = PROMPTS, **options: Any
) -> list[asyncio.Task[Any]]:
    """Runs all streams on one worker, then brings the other back."""
    count = len(prompts) * options.get("num_return_sequences", 1)
    await learned(on)
    first, *others = on.engines
    for other in others:
        await on.client.admin.drain_worker(other, finish_seconds=0)
    before = on.load(first).generated_tokens
    asked = [on.ask(prompt, max_tokens=TOKENS, **options) for prompt in prompts]
    await eventually(lambda: on.load(first).running_sequences == count)
    await eventually(lambda: on.load(first).generated_tokens > before + 2 * count)
    for other in others:
        await on.client.admin.resume_worker(other)
    return asked


async def tokens_of(asked: list[asyncio.Task[Any]]) -> list[Any]:
    answers = await asyncio.gather(*asked)
    assert [item.error for items in answers for item in items] == [None] * len(asked)
    return [each.token_ids for items in answers for item in items for each in item.sequences]


async def planned(on: Workers, *, dry_run: bool) -> Sequence[admin_pb.StreamMove]:
    """The moves of a plan, once the pool is so full that some pay. Slows the streams down then."""
    admin = on.client.admin
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if moves := (await admin.rebalance_workers(dry_run=True)).moves:
                on.set_pace(SLOW_MS)
                return moves if dry_run else (await admin.rebalance_workers()).moves
            await asyncio.sleep(0.05)


async def all_moved(on: Workers, moves: Sequence[admin_pb.StreamMove]) -> None:
    """Waits for the end of moves whose streams are slow."""
    await eventually(lambda: on.handoffs(cause="rebalance") == len(moves))
    assert on.handoffs(cause="rebalance", result="moved") == len(moves)
    assert on.moved(cause="rebalance") == len(moves)


async def undisturbed(prompts: Sequence[Any] = PROMPTS, **options: Any) -> list[Any]:
    async with workers("mixed", timing={"step_ms": 0.0}) as on:
        return await tokens_of([on.ask(p, max_tokens=TOKENS, **options) for p in prompts])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> list[Any]:
    """The tokens of all streams where none moves."""
    return await undisturbed()


async def test_full_pool_is_evened_out_once_and_a_dry_run_only_tells(whole: list[Any]) -> None:
    async with workers("mixed", "mixed", **SMALL_POOL) as on:
        asked = await crowded(on)
        first, second = on.engines
        moves = await planned(on, dry_run=True)
        assert {(move.sender, move.receiver) for move in moves} == {(first, second)}
        assert all(move.gain_seconds > move.cost_seconds and not move.began for move in moves)
        assert not on.load(second).running_sequences
        moves = (await on.client.admin.rebalance_workers()).moves
        assert moves
        assert all(move.began for move in moves)
        await all_moved(on, moves)
        assert on.load(second).computed_prompt_tokens < 32 * len(moves)
        again = (await on.client.admin.rebalance_workers()).moves
        moved = {move.request_id for move in moves}
        assert not [move for move in again if move.request_id in moved]
        explained = await on.client.admin.explain(moves[0].request_id)
        assert [each.cause for each in explained.placements] == ["first", "rebalance"]
        on.set_pace(0)
        assert await tokens_of(asked) == whole
        await on.quiet()


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "seed": 5}], ids=["greedy", "sampled"]
)
async def test_sequences_of_an_item_move_with_their_prompt_once(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, prompts = options | {"num_return_sequences": 2}, PROMPTS[:3]
    present, note = list[int](), LiveHandoff.on_reserved

    def noted(handoff: LiveHandoff, present_tokens: int) -> None:
        present.append(present_tokens)
        note(handoff, present_tokens)

    monkeypatch.setattr(LiveHandoff, "on_reserved", noted)
    async with workers("mixed", "mixed", **SMALL_POOL) as on:
        asked = await crowded(on, prompts, **options)
        moves = await planned(on, dry_run=False)
        assert {*Counter(move.request_id for move in moves).values()} == {2}
        assert {move.sequence_index for move in moves} == {0, 1}
        await all_moved(on, moves)
        # The second finds the prompt of the first at the receiver.
        assert present == [0, len(prompts[0])] * (len(moves) // 2)
        on.set_pace(0)
        assert await tokens_of(asked) == await undisturbed(prompts, **options)
        await on.quiet()


@pytest.mark.parametrize("verb", ["rebalance", "drain", "drain_by"])
async def test_no_stream_moves_to_a_worker_that_would_end_it_earlier(
    verb: str, whole: list[Any]
) -> None:
    short = {"limits": {"max_sequence_tokens": 80}}
    of_worker = {"mixed-1": short}
    async with workers("mixed", "mixed", "mixed", of_worker=of_worker, **SMALL_POOL) as on:
        first, second, _ = on.engines
        asked = await crowded(on)
        before = on.load(second).generated_tokens
        if verb == "rebalance":
            await planned(on, dry_run=False)
        else:
            limit = {"finish_seconds": 0} if verb == "drain" else {"by_seconds": 1}
            assert (await on.client.admin.drain_worker(first, **limit)).moved_sequences == STREAMS
        # What is left at the end of the time moves without its KV.
        await eventually(lambda: on.moved() >= 1)
        on.set_pace(0)
        assert await tokens_of(asked) == whole
        assert on.load(second).generated_tokens == before
        await on.quiet()


async def test_plan_looks_at_a_sample_and_leaves_items_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with workers("mixed", "mixed", **SMALL_POOL) as on:
        asked = await crowded(on)
        fleet = on.client.router._fleet
        first, second = (on.proxies[name].address for name in on.engines)
        await eventually(lambda: all(s.may_move for s in Scene.of(fleet, "simulated").streams))
        scene = Scene.of(fleet, "simulated")
        assert {each.worker for each in scene.streams} == {first}
        assert len(scene.streams) == STREAMS
        assert [site.stands_for for site in scene.sites] == [1, 1]
        assert not Scene.of(fleet, "simulated", second).streams
        monkeypatch.setattr(streams, "MOST_OF_WORKER", 2)
        seen = set[int]()

        def all_were_seen() -> bool:
            sample = Scene.of(fleet, "simulated", first)
            assert len(sample.streams) == 2
            assert sorted(site.stands_for for site in sample.sites) == [1, STREAMS // 2]
            seen.update(map(id, sample.runs))
            return seen == {*map(id, scene.runs)}

        await eventually(all_were_seen)
        items = [run.owner for run in scene.runs]
        assert all(isinstance(item, ItemRun) and item._handoffs is None for item in items)
        await tokens_of(asked)
        await on.quiet()


async def test_router_goes_on_after_a_defect_in_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "LOOK_SECONDS", 0.01)
    looks = []

    class Broken(movement.Movement):
        async def look(self) -> None:
            looks.append(self)
            raise ValueError("a defect")

    async with workers("mixed") as on:
        router = on.client.router
        running = asyncio.create_task(Broken(router._fleet, router._members).run())
        await eventually(lambda: len(looks) > 2)
        assert not running.done()
        running.cancel()


async def test_repetition_of_the_canary_holds_up_no_drain() -> None:
    settings = {"canary_share": 1.0}
    of_worker = {"mixed-1": {"timing": {"step_ms": 500.0}}}
    async with workers("mixed", "mixed", settings=settings, of_worker=of_worker) as on:
        first, second = on.engines
        await on.client.admin.drain_worker(second, finish_seconds=0)
        asked = on.ask(PROMPT, max_tokens=100)
        await eventually(lambda: on.load(first).running_sequences)
        await on.client.admin.resume_worker(second)
        await asked
        await eventually(lambda: on.load(second).running_sequences)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await on.client.admin.drain_worker(second, by_seconds=300)
        await on.quiet()


async def test_router_moves_streams_by_itself_where_configured() -> None:
    async with workers("mixed", "mixed", settings={"defragment": True}, **SMALL_POOL) as on:
        options: dict[str, Any] = {"temperature": 0.9, "seed": 7}
        asked = await crowded(on, **options)
        await eventually(lambda: on.handoffs(cause="rebalance", result="moved") >= 1)
        assert await tokens_of(asked) == await undisturbed(**options)
        assert on.handoffs(cause="rebalance") <= STREAMS
        await on.quiet()


async def test_room_is_made_for_a_long_prompt(whole: list[Any]) -> None:
    settings = {"placement": {"policy": "round_robin"}}
    # A worker keeps blocks for all tokens of its own streams, and needs some for another one.
    pool = SMALL_POOL | {"kv_cache": {"total_blocks": 384, "tokens_per_block": BLOCK}}
    async with workers("mixed", "mixed", settings=settings, **pool) as on:
        await learned(on)
        assert not (await on.client.admin.rebalance_workers(room_tokens=100)).moves
        asked = [on.ask(prompt, max_tokens=TOKENS) for prompt in PROMPTS * 2]
        await eventually(lambda: all(on.load(n).running_sequences == STREAMS for n in on.engines))
        await eventually(lambda: all(on.load(n).generated_tokens > 160 for n in on.engines))
        on.set_pace(SLOW_MS)
        # More than either has free, and less than it would have without a few streams.
        tokens = BLOCK * (max(on.load(name).free_blocks for name in on.engines) + 16)
        moves = (await on.client.admin.rebalance_workers(room_tokens=tokens)).moves
        assert moves
        assert len({(move.sender, move.receiver) for move in moves}) == 1
        assert all(move.began for move in moves)
        await all_moved(on, moves)
        assert not (await on.client.admin.rebalance_workers(room_tokens=2**20)).moves
        on.set_pace(0)
        assert await tokens_of(asked) == 2 * whole
        await on.quiet()


async def test_worker_is_empty_before_it_is_gone(whole: list[Any]) -> None:
    async with workers("mixed", "mixed", "mixed", **SMALL_POOL) as on:
        asked = await crowded(on)
        first, *_ = on.engines
        drained = await on.client.admin.drain_worker(first, by_seconds=2)
        assert (drained.moved_sequences, drained.left_sequences) == (STREAMS, 0)
        await eventually(lambda: on.handoffs(cause="drain", result="moved") >= 1)
        assert drained.worker.state == admin_pb.WORKER_STATE_DRAINING
        assert await tokens_of(asked) == whole
        await on.quiet()


async def test_what_cannot_move_with_its_kv_leaves_at_the_end_of_the_time() -> None:
    async with workers("mixed", "mixed", by_state=True, timing={"step_ms": 12.0}) as on:
        options: dict[str, Any] = {"num_return_sequences": 2, "temperature": 0.9, "seed": 5}
        first, second = on.engines
        await on.client.admin.drain_worker(second, finish_seconds=0)
        asked = on.ask(PROMPT, max_tokens=TOKENS, **options)
        await eventually(lambda: on.load(first).generated_tokens > 8)
        await on.client.admin.resume_worker(second)
        drained = await on.client.admin.drain_worker(first, by_seconds=1)
        assert (drained.moved_sequences, drained.left_sequences) == (2, 0)
        assert on.handoffs(cause="drain") == 0
        (item,) = await asked
        async with workers("mixed", timing={"step_ms": 0.0}) as alone:
            (whole,) = await alone.ask(PROMPT, max_tokens=TOKENS, **options)
        assert [s.token_ids for s in item.sequences] == [s.token_ids for s in whole.sequences]
        await on.client.admin.resume_worker(first)
        more = on.ask(PROMPT, max_tokens=5)
        assert (await more)[0].error is None
        await on.quiet()
