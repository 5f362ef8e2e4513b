"""Two scripted workers compute a late sequence: whoever is ahead delivers, and the client sees one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from leaks import gone, without_collector
from router.scripted import (
    LENGTH,
    PATIENCE_SECONDS,
    READY,
    ScriptedEngine,
    eventually,
    until_states,
)
from router.scripted_fleet import FIELDS, Fleet, fleet, refusal
from router.scripted_tokenizer import ScriptedTokenizer
from trtmesh.chassis.errors import AdapterNotFound, QueueFull
from trtmesh.client import ItemResult
from trtmesh.router.handoffs.item_handoffs import ItemHandoffs
from trtmesh.router.hedging.hedger import MOST_STARTS
from trtmesh.router.hedging.lateness import Budget, Obstacle, Wastes
from trtmesh.router.hedging.race import FirstCopy, SecondCopy
from trtmesh.router.requests.item import ItemRun
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

CANCELLED = pb.FINISH_REASON_CANCELLED
LEARNED = 40
"""Steps of the first worker, from which the fleet learns how late is late."""
PROMPT = [5, 6]
TOKENS = list(range(100, 150))
"""Of the sequence, whoever computes it."""


@dataclass
class Scene:
    """A sequence of `LEARNED` tokens whose worker is late, and the copy at the other."""

    on: Fleet
    first: ScriptedEngine
    second: ScriptedEngine
    asked: asyncio.Task[list[ItemResult]]
    handle: int
    copy: epb.SubmitCommand

    async def step_first(self, start: int, *tokens: int, end: bool = False) -> None:
        ends = [(self.handle, LENGTH)] if end else []
        await self.first.step((self.handle, start, tokens), ends=ends)

    async def step_second(self, start: int, *tokens: int, end: bool = False) -> None:
        ends = [(self.copy.handle, LENGTH)] if end else []
        await self.second.step((self.copy.handle, start, tokens), ends=ends)

    async def stopped(self, engine: ScriptedEngine, handle: int) -> None:
        """Waits until a worker was asked to end a copy, and lets it do so."""
        await eventually(lambda: (handle, CANCELLED) in engine.stops)
        await engine.step(ends=[(handle, CANCELLED)])

    async def ended(self) -> ItemResult:
        (item,) = await self.asked
        await self.nothing_left()
        return item

    async def nothing_left(self) -> None:
        """The workers end what they were asked to, another copy included where this machine was slow."""
        gauge, ended = self.on.client.gauge, set[tuple[int, int]]()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while gauge("worker_sequences") or gauge("worker_bookings"):
                for engine in self.on.engines:
                    for handle, reason in engine.stops:
                        if (id(engine), handle) not in ended:
                            ended.add((id(engine), handle))
                            await engine.step(ends=[(handle, reason)])
                await asyncio.sleep(0.005)
        await eventually(lambda: self.reserved == 0)

    @property
    def reserved(self) -> float:
        """Tokens that copies reserve of the budget."""
        return self.on.client.router._hedger._budget.reserved

    def hedges(self, outcome: str) -> float:
        return counted(self.on, "hedges", cause="stall", outcome=outcome)


def counted(on: Fleet, name: str, **labels: str) -> float:
    """A counter; 0 before it exists."""
    return on.client.registry.get_sample_value(f"trtmesh_router_{name}_total", labels) or 0.0


async def late(on: Fleet, **options: Any) -> tuple[ScriptedEngine, int, asyncio.Task[Any]]:
    """An item whose worker stops after LEARNED tokens: the worker, the handle and the item."""
    asked = on.ask(PROMPT, **{"max_tokens": len(TOKENS)} | options)
    first = await on.first()
    handle = first.submits[0].handle
    for number in range(LEARNED):
        await first.step((handle, number, TOKENS[number : number + 1]))
        await asyncio.sleep(0.001)
    return first, handle, asked


@asynccontextmanager
async def racing(**options: Any) -> AsyncIterator[Scene]:
    """A race, of which nothing is left after the block."""
    # Where both workers die, one is there again as soon as this machine allows.
    patient = {"worker_wait_seconds": PATIENCE_SECONDS}
    with without_collector():
        async with fleet(hedge_share=0.02, retries=patient) as on:
            first, handle, asked = await late(on, **options)
            second = on.other(first)
            (copy,) = await second.submitted()
            yield Scene(on, first, second, asked, handle, copy)
        await gone(SecondCopy)


async def test_second_copy_is_ahead_and_goes_on() -> None:
    async with racing(request_id="late") as scene:
        assert scene.reserved == Wastes.FIRST
        assert [*scene.copy.token_ids] == PROMPT + TOKENS[:LEARNED]
        assert scene.copy.emitted_tokens == LEARNED
        await scene.step_second(LEARNED, TOKENS[LEARNED])
        await eventually(lambda: (scene.handle, CANCELLED) in scene.first.stops)
        # The first worker computed a token more before it was told.
        await scene.step_first(LEARNED, TOKENS[LEARNED])
        await scene.stopped(scene.first, scene.handle)
        await scene.step_second(LEARNED + 1, *TOKENS[LEARNED + 1 :], end=True)
        item = await scene.ended()
        assert [*item.token_ids] == TOKENS
        assert scene.hedges("won") == scene.hedges("started") == 1
        gauge = scene.on.client.gauge
        assert gauge("hedge_wasted_tokens_total") == 1
        assert gauge("hedge_copied_tokens_total") == len(PROMPT) + LEARNED
        assert gauge("hedge_saved_seconds_total") > 0
        assert gauge("hedge_differences_total") == 0
        explained = await scene.on.client.admin.explain("late")
        (hedge,) = explained.hedges
        assert (hedge.outcome, hedge.cause, hedge.token_offset) == ("won", "stall", LEARNED)
        assert hedge.worker == scene.first.description.worker
        assert hedge.second_worker == scene.second.description.worker
        assert [each.cause for each in explained.placements] == ["first", "hedge"]
        totals = (await scene.on.client.status()).hedging
        assert (totals.started, totals.won, totals.wasted_tokens) == (1, 1, 1)


async def test_first_worker_recovers() -> None:
    async with racing() as scene:
        # All in a message: the later two are in time, however slow this machine is.
        steps = [
            epb.EngineEvent(
                step=epb.Step(
                    handles=[scene.handle],
                    token_offsets=[at],
                    token_counts=[1],
                    token_ids=[TOKENS[at]],
                )
            )
            for at in range(LEARNED, LEARNED + 3)
        ]
        await scene.first.send(*steps)
        await eventually(lambda: (scene.copy.handle, CANCELLED) in scene.second.stops)
        await scene.step_second(LEARNED, TOKENS[LEARNED])
        await scene.stopped(scene.second, scene.copy.handle)
        await scene.step_first(LEARNED + 3, *TOKENS[LEARNED + 3 :], end=True)
        assert [*(await scene.ended()).token_ids] == TOKENS
        assert scene.hedges("lost") == 1
        assert scene.on.client.gauge("hedge_wasted_tokens_total") == 1


async def test_copy_too_far_behind_for_the_budget_is_stopped() -> None:
    """The first worker is ahead by more tokens than copies may waste, at its first step since it stalled."""
    many = range(200, 200 + int(2 * Budget.FIRST))
    async with racing(request_id="late", max_tokens=LEARNED + len(many)) as scene:
        await scene.step_first(LEARNED, *many, end=False)
        await scene.stopped(scene.second, scene.copy.handle)
        await scene.first.step(ends=[(scene.handle, LENGTH)])
        assert [*(await scene.ended()).token_ids] == [*TOKENS[:LEARNED], *many]
        hedge, *_ = (await scene.on.client.admin.explain("late")).hedges
        assert (hedge.outcome, hedge.detail) == ("lost", Obstacle.BUDGET.text)
        assert scene.on.client.gauge("hedge_wasted_tokens_total") == 0


@pytest.mark.parametrize("who", ["a copy behind", "a copy that lost", "a first copy that lost"])
async def test_copies_with_other_tokens_are_told(who: str) -> None:
    """The client has the tokens of one of them, to the end."""
    async with racing() as scene:
        wrong = TOKENS[LEARNED] + 1
        if who == "a first copy that lost":
            await scene.step_second(LEARNED, TOKENS[LEARNED])
            await eventually(lambda: scene.first.stops)
            await scene.step_first(LEARNED, wrong)
            await scene.stopped(scene.first, scene.handle)
            await scene.step_second(LEARNED + 1, *TOKENS[LEARNED + 1 :], end=True)
        else:
            if who == "a copy behind":
                await scene.step_first(LEARNED, *TOKENS[LEARNED : LEARNED + 2])
                metrics = scene.on.client.gauge
                await eventually(lambda: metrics("tokens_out_total", model="m") == LEARNED + 2)
                await scene.step_second(LEARNED, wrong, 7, 8, 9)
                await scene.stopped(scene.second, scene.copy.handle)
                await scene.step_first(LEARNED + 2, *TOKENS[LEARNED + 2 :], end=True)
            else:
                await scene.step_first(LEARNED, *TOKENS[LEARNED:], end=True)
                await eventually(lambda: scene.second.stops)
                await scene.step_second(LEARNED, wrong)
                await scene.stopped(scene.second, scene.copy.handle)
        assert [*(await scene.ended()).token_ids] == TOKENS
        assert scene.on.client.gauge("hedge_differences_total") == 1


async def test_first_worker_dies() -> None:
    """The copy goes on, and nothing is submitted a third time."""
    async with racing() as scene:
        await scene.first.hang_up()
        await eventually(lambda: scene.hedges("won"))
        await scene.step_second(LEARNED, *TOKENS[LEARNED:], end=True)
        assert [*(await scene.ended()).token_ids] == TOKENS
        assert len(scene.second.submits) == 1


async def test_first_worker_dies_ahead_of_the_copy() -> None:
    """What the copy computes again is wasted."""
    async with racing() as scene:
        await scene.step_first(LEARNED, *TOKENS[LEARNED : LEARNED + 2])
        gauge = scene.on.client.gauge
        await eventually(lambda: gauge("tokens_out_total", model="m") == LEARNED + 2)
        await scene.first.hang_up()
        await eventually(lambda: scene.hedges("won"))
        await scene.step_second(LEARNED, *TOKENS[LEARNED:], end=True)
        assert [*(await scene.ended()).token_ids] == TOKENS
        assert gauge("hedge_wasted_tokens_total") == 2


async def test_worker_stalls_right_after_its_copy_won() -> None:
    """The sequence began there, and is late again."""
    async with racing() as scene:
        await scene.step_second(LEARNED, TOKENS[LEARNED])
        await scene.stopped(scene.first, scene.handle)
        _, back = await scene.first.submitted(2)
        assert back.emitted_tokens == LEARNED + 1
        await scene.first.step(
            (back.handle, LEARNED + 1, TOKENS[LEARNED + 1 :]), ends=[(back.handle, LENGTH)]
        )
        assert [*(await scene.ended()).token_ids] == TOKENS


@pytest.mark.parametrize("drained", ["first", "second"])
async def test_drained_worker_has_no_copies_of_others(drained: str) -> None:
    """A drain tells what became of the worker's own sequences."""
    async with racing() as scene:
        engine = scene.first if drained == "first" else scene.second
        told = await scene.on.client.admin.drain_worker(engine.description.worker, finish_seconds=0)
        left = (told.finished_sequences, told.moved_sequences, told.left_sequences)
        assert left == ((0, 1, 0) if drained == "first" else (0, 0, 0))


async def test_racing_sequence_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ItemHandoffs, "_keeps_kv", lambda *_: True)
    async with racing() as scene:
        workers = scene.on.client.router._fleet.workers.values()
        first = next(w for w in workers if w.name == scene.first.description.worker)
        (held,) = first.sequences.values()
        assert isinstance(held, FirstCopy)
        run = held._run
        assert isinstance(run.owner, ItemRun)
        assert not run.owner.may_move(run)
        await scene.second.hang_up()
        await eventually(lambda: scene.hedges("lost"))
        assert run.owner.may_move(run)


@pytest.mark.parametrize("lacking", ["first", "second"])
async def test_worker_without_the_adapter_is_noted(lacking: str) -> None:
    """Its description still lists what it evicted: the next item goes elsewhere."""
    engines = [
        ScriptedEngine(worker=name, supported_fields=[*FIELDS, "lora.id"]) for name in ("a", "b")
    ]
    key = (7, "v1")
    async with fleet(*engines, hedge_share=0.02) as on:
        workers = on.client.router._fleet.workers.values()
        for engine in engines:
            await engine.tell_adapter(*key)
        await eventually(lambda: all(key in worker.adapters.held for worker in workers))
        first, handle, _ = await late(on, adapter=pb.LoraConfig(id=7))
        second = on.other(first)
        (copy,) = await second.submitted()
        engine, refused = (first, handle) if lacking == "first" else (second, copy.handle)
        await engine.step(ends=[refusal(refused, AdapterNotFound("evicted"))])
        name = engine.description.worker
        await eventually(lambda: [w.name for w in workers if key not in w.adapters.held] == [name])


async def test_defect_ends_no_hedging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is tried again with its next token."""
    hedge, tries = ItemRun.hedge, list[int]()

    def breaks_once(item: ItemRun, *args: Any) -> str:
        tries.append(item.generated_tokens)
        if len(tries) == 1:
            raise AssertionError("a defect")
        return hedge(item, *args)

    monkeypatch.setattr(ItemRun, "hedge", breaks_once)
    async with fleet(hedge_share=0.02) as on:
        first, handle, _ = await late(on)
        await eventually(lambda: counted(on, "hedges_refused", reason="item"))
        await first.step((handle, LEARNED, TOKENS[LEARNED : LEARNED + 1]))
        (copy,) = await on.other(first).submitted()
        assert tries == [LEARNED, copy.emitted_tokens] == [LEARNED, LEARNED + 1]


async def test_second_worker_dies() -> None:
    async with racing() as scene:
        await scene.second.hang_up()
        await eventually(lambda: scene.hedges("lost"))
        await scene.step_first(LEARNED, *TOKENS[LEARNED:], end=True)
        assert [*(await scene.ended()).token_ids] == TOKENS


async def test_both_workers_die() -> None:
    async with racing() as scene:
        await asyncio.gather(scene.second.hang_up(), scene.first.hang_up())
        await eventually(lambda: len(scene.first.submits) + len(scene.second.submits) > 2)
        engine = scene.first if len(scene.first.submits) > 1 else scene.second
        submit = engine.submits[-1]
        assert [*submit.token_ids] == PROMPT + TOKENS[:LEARNED]
        await engine.step(
            (submit.handle, LEARNED, TOKENS[LEARNED:]), ends=[(submit.handle, LENGTH)]
        )
        assert [*(await scene.ended()).token_ids] == TOKENS


async def test_second_worker_refuses_the_copy() -> None:
    async with racing() as scene:
        await scene.second.step(ends=[refusal(scene.copy.handle, QueueFull("full"))])
        await eventually(lambda: scene.hedges("lost"))
        await scene.step_first(LEARNED, *TOKENS[LEARNED:], end=True)
        assert [*(await scene.ended()).token_ids] == TOKENS


async def test_first_worker_ends_the_sequence_first() -> None:
    async with racing() as scene:
        await scene.step_first(LEARNED, *TOKENS[LEARNED:], end=True)
        (item,) = await scene.asked
        await scene.stopped(scene.second, scene.copy.handle)
        assert [*item.token_ids] == TOKENS
        await scene.nothing_left()
        assert scene.hedges("ended") == 1


async def test_client_stops_the_request() -> None:
    async with racing(request_id="mine") as scene:
        await scene.on.client.stop("mine")
        await scene.stopped(scene.second, scene.copy.handle)
        await eventually(lambda: scene.first.stops)
        await scene.first.step(ends=scene.first.stops)
        item = await scene.ended()
        assert [*item.token_ids] == TOKENS[:LEARNED]


async def test_client_leaves() -> None:
    async with racing() as scene:
        scene.asked.cancel()
        await scene.stopped(scene.second, scene.copy.handle)
        await scene.stopped(scene.first, scene.handle)
        await scene.nothing_left()


async def test_first_token_is_late() -> None:
    """In a queue, or at a worker that is frozen."""
    async with fleet(hedge_share=0.02) as on:
        for engine in on.engines:
            on.serve(engine)
        for _ in range(3 * LEARNED):
            await on.ask(PROMPT, max_tokens=1)
            await asyncio.sleep(0.005)
        # In a slow moment a sequence has a copy here too.
        await eventually(lambda: not on.client.gauge("worker_sequences"))
        await on.end()
        before = {id(engine): len(engine.submits) for engine in on.engines}
        won = partial(counted, on, "hedges", cause="first_token", outcome="won")
        won_before = won()
        asked = on.ask(PROMPT, num_return_sequences=2, max_tokens=1)

        def fresh() -> list[tuple[ScriptedEngine, epb.SubmitCommand]]:
            return [
                (engine, submit)
                for engine in on.engines
                for submit in engine.submits[before[id(engine)] :]
            ]

        # The item, and a copy of each of its sequences.
        await eventually(lambda: len(fresh()) == 3)
        whole = next(
            engine for engine in on.engines if len(engine.submits) == before[id(engine)] + 1
        )
        other = on.other(whole)
        copies = [submit for engine, submit in fresh() if engine is other]
        assert {each.sequence_index for each in copies} == {0, 1}
        assert all([*each.token_ids] == PROMPT for each in copies)
        for copy in copies:
            await other.step(
                (copy.handle, 0, [30 + copy.sequence_index]), ends=[(copy.handle, LENGTH)]
            )
        (item,) = await asked
        assert [[*each.token_ids] for each in item.sequences] == [[30], [31]]
        first = whole.submits[-1].handle
        stops = {(first, CANCELLED), (first + 1, CANCELLED)}
        await eventually(lambda: stops <= {*whole.stops})
        await whole.step(ends=[*stops])
        await eventually(lambda: not on.client.gauge("worker_sequences"))
        assert won() == won_before + 2


async def test_inexact_workers_get_no_copies_and_explain_says_why() -> None:
    engines = [
        ScriptedEngine(worker=name, supported_fields=FIELDS, resumes_exactly=False)
        for name in ("one", "two")
    ]
    async with fleet(*engines, hedge_share=0.02) as on:
        first, handle, asked = await late(on, request_id="mine")
        await eventually(lambda: counted(on, "hedges_refused", reason="not_exact"))
        (hedge,) = (await on.client.admin.explain("mine")).hedges
        assert (hedge.outcome, hedge.second_worker) == ("refused", "")
        assert "batch_invariant" in hedge.detail
        await first.step((handle, LEARNED, TOKENS[LEARNED:]), ends=[(handle, LENGTH)])
        assert [*(await asked)[0].token_ids] == TOKENS
        assert not on.other(first).submits
        # Counted once, however long it lasted.
        assert counted(on, "hedges_refused", reason="not_exact") == 1


async def test_float32_counts_as_exact() -> None:
    engines = [
        ScriptedEngine(
            worker=name,
            supported_fields=FIELDS,
            resumes_exactly=False,
            backend="torch",
            data_type=pb.DATA_TYPE_FP32,
        )
        for name in ("one", "two")
    ]
    async with fleet(*engines, hedge_share=0.02) as on:
        first, _, _ = await late(on)
        await on.other(first).submitted()


@pytest.mark.parametrize(("most", "copies"), [(51, 0), (52, 1)])
async def test_worker_that_would_cut_a_sequence_gets_no_copy(most: int, copies: int) -> None:
    """A prompt of 2 and 50 new tokens take 52."""
    long, short = (
        ScriptedEngine(worker=name, supported_fields=FIELDS, max_sequence_tokens=limit)
        for name, limit in (("long", 1000), ("short", most))
    )
    async with fleet(long, short, hedge_share=0.02) as on:
        await short.report(draining=True)
        await until_states(on.client, [READY, admin_pb.WORKER_STATE_DRAINING], [])
        first, handle, asked = await late(on)
        await short.report(draining=False)
        await eventually(lambda: short.submits or counted(on, "hedges_refused", reason="item"))
        assert len(short.submits) == copies
        await first.step((handle, LEARNED, TOKENS[LEARNED:]), ends=[(handle, LENGTH)])
        assert [*(await asked)[0].token_ids] == TOKENS


async def test_sequence_with_its_stop_text_gets_no_copy() -> None:
    """Its worker was asked to end it and stalls: nobody needs more tokens. The other sequence there has a copy."""
    texts = ScriptedTokenizer(vocabulary_size=256)
    texts.stop_token = TOKENS[LEARNED - 1]
    one, two = (ScriptedEngine(worker=name, supported_fields=FIELDS) for name in ("one", "two"))
    async with fleet(one, two, tokenizers=[texts], hedge_share=0.02) as on:
        await two.report(draining=True)
        await until_states(on.client, [READY, admin_pb.WORKER_STATE_DRAINING], [READY])
        options = {"max_tokens": len(TOKENS), "text": True}
        stopped = on.ask(PROMPT, stop_texts=[chr(texts.stop_token)], **options)
        (first,) = await one.submitted()
        going_on = on.ask(PROMPT, **options)
        handles = [each.handle for each in await one.submitted(2)]
        for at in range(LEARNED):
            await one.step(*((handle, at, [TOKENS[at]]) for handle in handles))
            await asyncio.sleep(0.001)
        await eventually(lambda: [handle for handle, _ in one.stops] == [first.handle])
        await two.report(draining=False)
        (copy,) = await two.submitted()
        await two.step((copy.handle, LEARNED, TOKENS[LEARNED:]), ends=[(copy.handle, LENGTH)])
        assert [*(await going_on)[0].token_ids] == TOKENS
        assert len(two.submits) == 1
        await one.step(ends=one.stops)
        assert [*(await stopped)[0].token_ids] == TOKENS[:LEARNED]


async def test_hopeless_sequences_hold_up_no_other() -> None:
    """Beams, which have no copies, are more than a look tries."""
    engines = [
        ScriptedEngine(worker=name, supported_fields=[*FIELDS, "beam_search.beam_width"])
        for name in ("one", "two")
    ]
    async with fleet(*engines, hedge_share=0.02) as on:
        one, two = engines
        await two.report(draining=True)
        await until_states(on.client, [READY, admin_pb.WORKER_STATE_DRAINING], [])
        count = MOST_STARTS // 2 + 1
        on.start(*[PROMPT] * count, beam_width=2, max_tokens=len(TOKENS))
        await one.submitted(count)
        on.start(PROMPT, max_tokens=len(TOKENS))
        handles = [each.handle for each in await one.submitted(count + 1)]
        handles = [*handles, *(handle + 1 for handle in handles[:-1])]
        for at in range(LEARNED):
            await one.step(*((handle, at, [TOKENS[at]]) for handle in handles))
            await asyncio.sleep(0.001)
        await two.report(draining=False)
        (copy,) = await two.submitted()
        assert copy.emitted_tokens == LEARNED
        await eventually(lambda: counted(on, "hedges_refused", reason="item") >= 2 * count)


async def test_nothing_is_hedged_unless_asked_for() -> None:
    async with fleet() as on:
        first, handle, asked = await late(on)
        await asyncio.sleep(0.3)
        await first.step((handle, LEARNED, TOKENS[LEARNED:]), ends=[(handle, LENGTH)])
        assert [*(await asked)[0].token_ids] == TOKENS
        assert not on.other(first).submits
        assert not (await on.client.status()).HasField("hedging")
