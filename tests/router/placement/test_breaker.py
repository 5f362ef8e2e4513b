"""Faults before first tokens open a worker's breaker; back-pressure does not."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from rich.console import Console
from router.scripted import READY, ScriptedEngine, eventually, until_states
from router.scripted_fleet import FIELDS, Fleet, fleet, refusal
from trtmesh.chassis.errors import BackendFailed, Draining, InvalidField, QueueFull, TrtmeshError
from trtmesh.cli.tables import workers_table
from trtmesh.router.placement import load_guard
from trtmesh.v1 import router_admin_pb2 as admin_pb

CLOSED = admin_pb.BREAKER_STATE_CLOSED
OPEN = admin_pb.BREAKER_STATE_OPEN
HALF_OPEN = admin_pb.BREAKER_STATE_HALF_OPEN
DRAINING = admin_pb.WORKER_STATE_DRAINING
STALLED = admin_pb.WORKER_STATE_STALLED

MOST_TRIED = 10
"""Most items sent to two workers until one of them rests."""


@pytest.fixture
def long_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open breakers stay open until the end of the test."""
    monkeypatch.setattr(load_guard, "FIRST_REST_SECONDS", 3600.0)
    monkeypatch.setattr(load_guard, "LONGEST_REST_SECONDS", 3600.0)


async def rests(on: Fleet, engine: ScriptedEngine) -> str:
    """Checks every report of a resting worker; returns the table of workers."""
    worker = await on.worker(engine)
    assert (worker.state, worker.breaker, worker.faults) == (READY, OPEN, 3)
    assert on.client.gauge("open_breakers") == 1
    console = Console(width=200)
    with console.capture() as printed:
        console.print(workers_table([worker]))
    assert "ready, breaker open" in printed.get()
    assert "3 faults in a row, the last: worker" in printed.get()
    return worker.problem


async def test_worker_without_tokens_gets_no_items_for_a_while(
    long_rest: None,
) -> None:
    async with fleet(deadlines={"queue_seconds": 0.3}, placement={"policy": "round_robin"}) as on:
        on.start([5])
        sick = await on.first()
        well = on.other(sick)
        on.serve(well)
        # Reported tokens make no difference.
        on.beat(sick)
        for number in range(MOST_TRIED):
            assert (await on.ask([5], request_id=f"r{number}"))[0].error is None
            if (await on.worker(sick)).breaker != CLOSED:
                break
        assert "waiting for too long" in await rests(on, sick)
        tried = len(sick.submits)
        for number in range(4):
            assert (await on.ask([5], request_id=f"s{number}"))[0].error is None
        assert len(sick.submits) == tried
        seen = await on.candidates("s3")
        assert seen[sick.description.worker].excluded_by == "its breaker is open"


async def test_repeatedly_freezing_worker_gets_no_items_for_a_while(long_rest: None) -> None:
    async with fleet(deadlines={"silence_seconds": 0.5}, placement={"policy": "round_robin"}) as on:
        on.start([5])
        sick = await on.first()
        on.serve(on.other(sick))
        sick.reporting = False
        for faults in range(1, 4):
            await until_states(on.client, [READY, STALLED], [])
            assert (await on.worker(sick)).faults == faults
            sick.reporting = True
            await until_states(on.client, [READY, READY], [])
            if faults < 3:
                # Simultaneous errors are one fault.
                tried = len(sick.submits)
                on.start([5], [6], [7], [8])
                await sick.submitted(tried + 2)
                sick.reporting = False
        assert "it was silent" in await rests(on, sick)


@pytest.mark.parametrize("generating", [True, False])
async def test_queue_held_up_by_other_routers_is_not_a_fault(*, generating: bool) -> None:
    async with fleet(deadlines={"queue_seconds": 1.5}) as on:
        # A report of an empty queue after the item would count it as started.
        for engine in on.engines:
            engine.reporting = False
            await engine.report(step_count=1)
        workers = on.client.router._fleet.workers.values()
        await eventually(lambda: all(worker.load.step_count for worker in workers))
        on.start([5])
        one = await on.first()
        await one.report(waiting_sequences=1)
        other = on.other(one)
        for step_count in count(2):
            await one.report(step_count=step_count, generated_tokens=generating * step_count)
            if other.submits:
                break
            await asyncio.sleep(0.02)
        assert (await on.worker(one)).faults == (not generating)


@pytest.mark.parametrize(
    "error", [InvalidField("no"), QueueFull("full"), Draining("bye")], ids=lambda e: e.reason
)
async def test_errors_of_the_caller_do_not_count_as_faults(error: TrtmeshError) -> None:
    engine = ScriptedEngine(supported_fields=FIELDS)
    async with fleet(engine) as on:
        asked = on.ask([5])
        (submit,) = await engine.submitted()
        await engine.step(ends=[refusal(submit.handle, error)])
        if not isinstance(error, Draining):
            assert (await asked)[0].error is not None
        await eventually(lambda: on.client.gauge("worker_bookings") == 0 or len(engine.submits) > 1)
        assert (await on.worker(engine)).faults == 0


@pytest.mark.parametrize("how", ["by an admin", "of itself", "to its end"])
async def test_drain_is_not_a_fault(how: str) -> None:
    async with fleet() as on:
        on.start([5])
        one = await on.first()
        if how == "by an admin":
            await on.client.admin.drain_worker(one.description.worker, finish_seconds=0)
        elif how == "of itself":
            await one.report(draining=True, drain_ms=500)
        else:
            await one.report(draining=True)
            await until_states(on.client, [READY, DRAINING], [])
            await one.hang_up()
        await on.other(one).submitted()
        assert (await on.worker(one)).faults == 0


@pytest.mark.parametrize(("rest_seconds", "state"), [(3600.0, OPEN), (0.0, HALF_OPEN)])
async def test_where_all_rest_all_are_used_and_a_first_token_ends_it(
    monkeypatch: pytest.MonkeyPatch, rest_seconds: float, state: admin_pb.BreakerState.ValueType
) -> None:
    # Each of these errors counts, despite their pace.
    monkeypatch.setattr(load_guard, "INCIDENT_SECONDS", 0.0)
    monkeypatch.setattr(load_guard, "FIRST_REST_SECONDS", rest_seconds)
    monkeypatch.setattr(load_guard, "LONGEST_REST_SECONDS", rest_seconds)
    async with fleet(placement={"policy": "round_robin"}) as on:
        for number in range(6):
            asked = on.ask([5])
            await on.submitted(number + 1)
            latest = max(on.engines, key=lambda engine: engine.submitted_at)
            failure = BackendFailed("worker is out of order")
            await latest.step(ends=[refusal(latest.submits[-1].handle, failure)])
            assert isinstance((await asked)[0].error, BackendFailed)
        assert [worker.breaker for worker in (await on.client.status()).workers] == [state] * 2
        assert on.client.gauge("open_breakers") == 2
        for engine in on.engines:
            on.serve(engine)
        for _ in range(2):
            assert (await on.ask([5]))[0].error is None
        assert on.client.gauge("open_breakers") == (0 if state == HALF_OPEN else 1)
