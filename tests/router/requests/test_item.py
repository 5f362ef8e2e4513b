"""An item across dying, stalling, refusing and unequal workers: the client sees one uninterrupted stream."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from log_lines import LogLine
from process_constants import patch
from router.scripted import (
    LENGTH,
    READY,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
    until_states,
)
from router.scripted_fleet import FIELDS, Fleet, fleet, refusal
from trtmesh.chassis.errors import (
    AdaptersFull,
    Draining,
    NoWorker,
    QueueFull,
    TrtmeshError,
    WorkerLost,
)
from trtmesh.chassis.fair.turns import MAX_IN_SLICE
from trtmesh.router.requests.placer import Placer
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_admin_pb2 as admin_pb

STALLED = admin_pb.WORKER_STATE_STALLED
REFUSED = admin_pb.WORKER_STATE_REFUSED


async def test_moved_item_continues_after_its_last_token() -> None:
    async with fleet() as on:
        asked = on.ask([5, 6], temperature=1.0, seed=3)
        one = await on.first()
        (submit,) = one.submits
        await one.step((submit.handle, 0, [7, 8]))
        await one.hang_up()
        (moved,) = await on.other(one).submitted()
        assert list(moved.token_ids) == [5, 6, 7, 8]
        assert moved.emitted_tokens == 2
        assert (moved.sequence_index, moved.batch_index) == (0, 0)
        assert moved.config == submit.config
        await on.other(one).step((moved.handle, 2, [9]), ends=[(moved.handle, LENGTH)])
        (item,) = await asked
        assert item.error is None
        assert item.token_ids == (7, 8, 9)
        assert item.usage.generated_tokens == 3


@pytest.mark.parametrize("names", [("inexact", "exact"), ("inexact",)])
async def test_item_with_tokens_prefers_a_worker_that_resumes_exactly(
    names: tuple[str, ...],
) -> None:
    engines = [
        ScriptedEngine(worker=name, supported_fields=FIELDS, resumes_exactly=name != "inexact")
        for name in ("first", *names)
    ]
    first, *others = engines
    for engine in others:
        engine.refusal = "not yet"
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving_engine(e)) for e in engines]
        client = await stack.enter_async_context(
            serving_router(addresses, deadlines={"silence_seconds": 60})
        )
        await until_states(client, [READY] + [REFUSED] * len(others), [])
        on = Fleet(engines, client)
        asked = on.ask([5], request_id="r", temperature=1.0, seed=3)
        (submit,) = await first.submitted()
        await first.step((submit.handle, 0, [7]))
        for engine in others:
            engine.refusal = ""
        await until_states(client, [READY] * len(engines), [])
        await first.hang_up()
        (moved,) = await others[-1].submitted()
        excluded = (await on.candidates("r"))["inexact"].excluded_by
        assert excluded == ("lacks exact resumption" if "exact" in names else "")
        await others[-1].step((moved.handle, 1, [8]), ends=[(moved.handle, LENGTH)])
        (item,) = await asked
        assert item.token_ids == (7, 8)


async def test_item_without_tokens_restarts() -> None:
    async with fleet() as on:
        on.start([5, 6], num_return_sequences=3, temperature=1.0, seed=3)
        one = await on.first()
        await one.hang_up()
        (again,) = await on.other(one).submitted()
        again.handle = one.submits[0].handle
        again.timeout_ms = one.submits[0].timeout_ms
        again.ClearField("timeout_ms")
        assert again == one.submits[0]


async def test_sequences_of_a_moved_item_resume_separately() -> None:
    async with fleet() as on:
        options = {"num_return_sequences": 3, "temperature": 1.0, "seed": 3, "log_probs": True}
        asked = on.ask([5, 6], prompt_log_probs=True, **options)
        one = await on.first()
        handle = one.submits[0].handle
        prompts = [
            epb.SequencePrompt(handle=handle + i, details=pb.PromptDetails(log_probs=[-1.0]))
            for i in range(2)
        ]
        step = epb.Step(prompts=prompts)
        await one.send(epb.EngineEvent(step=step))
        await one.step((handle, 0, [7, 8]), (handle + 1, 0, [9]), ends=[(handle + 1, LENGTH)])
        await one.hang_up()
        two = on.other(one)
        moved = sorted(await two.submitted(2), key=lambda submit: submit.sequence_index)
        assert [submit.sequence_index for submit in moved] == [0, 2]
        assert [list(submit.token_ids) for submit in moved] == [[5, 6, 7, 8], [5, 6]]
        assert [submit.emitted_tokens for submit in moved] == [2, 0]
        assert not any(s.config.sampling.HasField("num_return_sequences") for s in moved)
        # The second has not reported the prompt's data.
        told = [submit.config.output.HasField("prompt_log_probs") for submit in moved]
        assert told == [False, True]
        ends = [(submit.handle, LENGTH) for submit in moved]
        await two.step((moved[0].handle, 2, [4]), (moved[1].handle, 0, [3]), ends=ends)
        (item,) = await asked
        assert [s.token_ids for s in item.sequences] == [(7, 8, 4), (9,), (3,)]
        assert item.usage.generated_tokens == 5


async def test_tokens_of_a_recovered_worker_are_dropped() -> None:
    async with fleet(deadlines={"silence_seconds": 0.5}) as on:
        asked = on.ask([5])
        one = await on.first()
        handle = one.submits[0].handle
        await one.step((handle, 0, [7]))
        one.reporting = False
        two = on.other(one)
        (moved,) = await two.submitted()
        assert list(moved.token_ids) == [5, 7]
        # Late tokens, made by the other worker too.
        await one.step((handle, 1, [8, 9]))
        await eventually(lambda: one.stops)
        assert one.stops == [(handle, pb.FINISH_REASON_CANCELLED)]
        one.reporting = True
        await until_states(on.client, [READY, READY], [])
        await two.step((moved.handle, 1, [8]))
        await one.step(ends=[(handle, pb.FINISH_REASON_CANCELLED)])
        await two.step((moved.handle, 2, [9]), ends=[(moved.handle, LENGTH)])
        (item,) = await asked
        assert item.token_ids == (7, 8, 9)


async def test_items_stay_on_a_silent_worker_without_another() -> None:
    engine = ScriptedEngine(supported_fields=FIELDS)
    async with fleet(engine, deadlines={"silence_seconds": 0.5}) as on:
        asked = on.ask([5])
        (submit,) = await engine.submitted()
        engine.reporting = False
        await until_states(on.client, [STALLED], [])
        await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])
        (item,) = await asked
        assert item.token_ids == (7,)
        assert not engine.stops


async def test_items_leave_a_silent_worker_once_another_joins() -> None:
    one, two = (ScriptedEngine(worker=name, supported_fields=FIELDS) for name in ("one", "two"))
    two.refusal = "not yet"
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving_engine(e)) for e in (one, two)]
        client = await stack.enter_async_context(
            serving_router(addresses, deadlines={"silence_seconds": 0.5})
        )
        await until_states(client, [READY, admin_pb.WORKER_STATE_REFUSED], [])
        on = Fleet((one, two), client)
        asked = on.ask([5])
        await one.submitted()
        one.reporting = False
        await until_states(client, [STALLED, admin_pb.WORKER_STATE_REFUSED], [])
        two.refusal = ""
        (moved,) = await two.submitted()
        await two.step((moved.handle, 0, [7]), ends=[(moved.handle, LENGTH)])
        assert (await asked)[0].token_ids == (7,)


async def test_item_may_return_to_a_recovered_worker() -> None:
    async with fleet(deadlines={"silence_seconds": 0.5}) as on:
        asked = on.ask([5])
        one = await on.first()
        await one.hang_up()
        two = on.other(one)
        (submit,) = await two.submitted()
        await two.step((submit.handle, 0, [7]))
        await until_states(on.client, [READY, READY], [])
        two.reporting = False
        (_, moved) = await one.submitted(2)
        assert list(moved.token_ids) == [5, 7]
        await one.step((moved.handle, 1, [8]), ends=[(moved.handle, LENGTH)])
        assert (await asked)[0].token_ids == (7, 8)


async def test_reports_without_steps_do_not_hold_an_item() -> None:
    async with fleet(deadlines={"step_gap_seconds": 0.3}) as on:
        on.start([5])
        one = await on.first()
        await one.report(step_count=4, running_sequences=1)
        (moved,) = await on.other(one).submitted()
        assert list(moved.token_ids) == [5]
        await eventually(lambda: one.stops)


async def test_unread_item_moves() -> None:
    async with fleet(deadlines={"silence_seconds": 0.3}) as on:
        for engine in on.engines:
            await engine.report(received_items=0)
        on.start([5])
        one = await on.first()
        await on.other(one).report(received_items=1)
        await on.other(one).submitted()


async def test_starving_sequence_moves_alone() -> None:
    async with fleet(deadlines={"queue_seconds": 3.0}, placement={"policy": "round_robin"}) as on:
        on.start([5], [6], [7], max_tokens=1000)
        await on.submitted(3)
        one = next(engine for engine in on.engines if len(engine.submits) == 2)
        fed, starving = (submit.handle for submit in one.submits)
        offset = 0
        while not one.stops:
            await one.step((fed, offset, [8]))
            offset += 1
            await asyncio.sleep(0.01)
        assert [handle for handle, _ in one.stops] == [starving]
        await on.other(one).submitted(2)


async def test_queued_item_moves_after_its_deadline() -> None:
    async with fleet(deadlines={"queue_seconds": 0.3}) as on:
        on.start([5])
        one = await on.first()
        await one.report(waiting_sequences=1, step_count=0)
        for step_count in itertools.count(1):
            await one.report(step_count=step_count)
            if on.other(one).submits:
                break
            await asyncio.sleep(0.05)


async def test_back_pressure_moves_an_item_until_all_workers_are_full() -> None:
    async with fleet() as on:
        asked = on.ask([5])
        one = await on.first()
        await one.step(ends=[refusal(one.submits[0].handle, QueueFull("full"))])
        two = on.other(one)
        (submit,) = await two.submitted()
        await two.step(ends=[refusal(submit.handle, Draining("draining"))])
        (item,) = await asked
        assert isinstance(item.error, QueueFull)
        assert len(one.submits) == 1


async def test_item_waits_while_all_workers_drain() -> None:
    async with fleet(retries={"worker_wait_seconds": 30}) as on:
        asked = on.ask([5])
        one = await on.first()
        await one.step(ends=[refusal(one.submits[0].handle, Draining("draining"))])
        two = on.other(one)
        (submit,) = await two.submitted()
        await two.step(ends=[refusal(submit.handle, Draining("draining"))])
        await eventually(lambda: len(one.submits) + len(two.submits) == 3)
        last = one if len(one.submits) == 2 else two
        await last.step((last.submits[-1].handle, 0, [8]), ends=[(last.submits[-1].handle, LENGTH)])
        assert (await asked)[0].token_ids == (8,)


async def test_started_item_waits_while_all_workers_are_full() -> None:
    async with fleet(retries={"worker_wait_seconds": 30}) as on:
        asked = on.ask([5])
        one = await on.first()
        await one.step((one.submits[0].handle, 0, [7]))
        await one.hang_up()
        two = on.other(one)
        (submit,) = await two.submitted()
        await two.step(ends=[refusal(submit.handle, QueueFull("full"))])
        await eventually(lambda: len(one.submits) + len(two.submits) == 3)
        last = one if len(one.submits) == 2 else two
        await last.step((last.submits[-1].handle, 1, [8]), ends=[(last.submits[-1].handle, LENGTH)])
        assert (await asked)[0].token_ids == (7, 8)


@pytest.mark.parametrize(
    ("error", "tokens"),
    [
        (AdaptersFull("full"), 1),
        (Draining("draining"), 0),
        (QueueFull("full"), 0),
        (QueueFull("full"), 1),
    ],
    ids=["adapters", "draining", "queue", "queue with tokens"],
)
async def test_refusals_after_dispatches_end_with_the_wait_and_repeat_ever_more_rarely(
    error: TrtmeshError, tokens: int, logged: Callable[[], list[LogLine]]
) -> None:
    """Without a limit over all refusals, the item would be placed again and again, with a record and log lines each."""
    async with fleet(retries={"worker_wait_seconds": 8.0}) as on:
        asked = on.ask([5], request_id="refused")
        one = await on.first()
        if tokens:
            await one.step((one.submits[0].handle, 0, [7]))
        for engine in on.engines:
            on.refuse(engine, error)
        (item,) = await asked
        assert item.error is not None
        placements = len((await on.client.admin.explain("refused")).placements)
        rounds = max(len(engine.submits) for engine in on.engines)
    if tokens or not isinstance(error, QueueFull):
        # 0.1, 0.2, 0.4, 0.8 and 1.6 s, then as long each, and what is left.
        assert 3 <= rounds <= 12
    moves = [line for line in logged() if " moves (" in line.message]
    assert len(moves) <= 2, "one for each worker"
    assert placements <= 3


async def test_a_token_ends_the_wait_that_refusals_began() -> None:
    async with fleet(retries={"worker_wait_seconds": 5.0}) as on:
        asked, submits = on.ask([5]), 0

        async def taker() -> tuple[ScriptedEngine, int]:
            """The next worker of the item, and its handle there."""
            nonlocal submits
            submits += 1
            await on.submitted(submits)
            latest = max(on.engines, key=lambda engine: engine.submitted_at)
            return latest, latest.submits[-1].handle

        one, handle = await taker()
        for token in range(5):
            await one.step((handle, token, [token]))
            # Both refuse it, so that it waits.
            for _ in on.engines:
                await one.step(ends=[refusal(handle, QueueFull("full"))])
                one, handle = await taker()
            # By the last refusal, together longer than the wait.
            await asyncio.sleep(1.4)
        await one.step((handle, 5, [9]), ends=[(handle, LENGTH)])
        assert (await asked)[0].token_ids == (0, 1, 2, 3, 4, 9)


async def test_item_breaking_every_worker_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, max_lost_workers=3)
    async with fleet(retries={"worker_wait_seconds": 30}) as on:
        asked = on.ask([5])
        for count in range(1, 4):
            await on.submitted(count)
            broken = max(on.engines, key=lambda e: e.submitted_at)
            await broken.hang_up()
        (item,) = await asked
        assert isinstance(item.error, WorkerLost)
        assert "3 workers in a row were lost with this item" in item.error.message


async def test_item_continues_only_with_equal_weights_and_tokenizer() -> None:
    one = ScriptedEngine(worker="one", supported_fields=FIELDS, model_fingerprint="a")
    two = ScriptedEngine(worker="two", supported_fields=FIELDS, model_fingerprint="b")
    async with fleet(one, two) as on:
        asked = on.ask([5])
        first = await on.first()
        await first.step((first.submits[0].handle, 0, [7]))
        first.refusal = "stays away"
        await first.hang_up()
        (item,) = await asked
        assert isinstance(item.error, WorkerLost)
        assert "model or tokenizer is not the one that the item began with" in item.error.message
        assert item.token_ids == (7,)
        assert not on.other(first).submits


async def test_stopped_item_does_not_move() -> None:
    async with fleet() as on:
        asked = on.ask([5], request_id="r")
        one = await on.first()
        await one.step((one.submits[0].handle, 0, [7]))
        assert await on.client.stop("r") == 1
        await eventually(lambda: one.stops)
        await one.hang_up()
        (item,) = await asked
        assert item.error is None
        assert item.reason == "stopped"
        assert item.token_ids == (7,)
        assert not on.other(one).submits


async def test_items_of_a_lost_worker_are_placed_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running streams would wait for all of them."""
    placed: Counter[int] = Counter()
    passes, place = 0, Placer.place

    async def count() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    def counted(placer: Placer, *arguments: Any) -> Any:
        placed[passes] += 1
        return place(placer, *arguments)

    monkeypatch.setattr(Placer, "place", counted)
    only = ScriptedEngine(worker="one", supported_fields=FIELDS)
    # The items wait until it is back.
    async with fleet(only, retries={"worker_wait_seconds": 60}) as on:
        (one,) = on.engines
        counting = asyncio.create_task(count())
        on.start(*[[5, 6]] * 300)
        await on.submitted(300)
        assert sum(placed.values()) == 300
        assert max(placed.values()) <= 2 * MAX_IN_SLICE
        placed.clear()
        await one.hang_up()
        await on.submitted(600)
        assert max(placed.values()) <= 2 * MAX_IN_SLICE
        counting.cancel()


async def test_no_ready_worker_fails_an_item_after_its_wait() -> None:
    engine = ScriptedEngine(supported_fields=FIELDS)
    async with fleet(engine) as on:
        engine.refusal = "stays away"
        await engine.hang_up()
        await until_states(on.client, [admin_pb.WORKER_STATE_REFUSED], [])
        (item,) = await on.ask([5])
        assert isinstance(item.error, NoWorker)
        assert "stays away" in item.error.message


async def test_items_leave_a_draining_worker_before_its_grace_ends() -> None:
    async with fleet() as on:
        asked = on.ask([5])
        one = await on.first()
        await one.step((one.submits[0].handle, 0, [7]))
        await one.report(draining=True, drain_ms=30_000)
        await asyncio.sleep(0.3)
        two = on.other(one)
        assert not two.submits
        await one.report(drain_ms=500)
        (moved,) = await two.submitted()
        await two.step((moved.handle, 1, [8]), ends=[(moved.handle, LENGTH)])
        assert (await asked)[0].token_ids == (7, 8)
