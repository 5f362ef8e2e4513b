"""Reports, placements and learned rates reach the next placement."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from process_constants import patch
from router.fleet.test_plan import fleet_of
from router.fleet.test_worker import link
from router.scripted import (
    LENGTH,
    PATIENCE_SECONDS,
    READY,
    ScriptedEngine,
    eventually,
    until_states,
)
from router.scripted_fleet import FIELDS, Fleet, fleet
from trtmesh.chassis.errors import PromptTooLong
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.router.adapters.adapters import ItemAdapter
from trtmesh.router.fleet.fleet import LONG_TOKENS
from trtmesh.router.fleet.fleet import Fleet as RouterFleet
from trtmesh.router.kv_index import index
from trtmesh.router.links.replica import LEAVING
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import Residency, load_guard
from trtmesh.router.placement.load_guard import LoadGuard
from trtmesh.router.placement.rates import FALLBACK_NEW_TOKENS, FALLBACK_STEP_SECONDS, Report
from trtmesh.router.placement.settings import HandoffSettings, PlacementSettings
from trtmesh.router.requests.siblings import MAX_TOGETHER
from trtmesh.router.router import WATCH_SECONDS
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import router_admin_pb2 as admin_pb

LOOKS = 100
"""Most placements observed until the router's refresh, every 0.1 s."""

LOOK_SECONDS = 0.02


def engines(*names: str, **description: Any) -> list[ScriptedEngine]:
    return [ScriptedEngine(worker=name, supported_fields=FIELDS, **description) for name in names]


async def told(on: Fleet, engine: ScriptedEngine, **load: float) -> None:
    """Makes an engine report a load; returns when the router has read the report."""
    await engine.report(**load)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            seen = (await on.worker(engine)).load
            if all(getattr(seen, name) == value for name, value in load.items()):
                return
            await asyncio.sleep(0.005)


async def test_load_reports_count_in_placement() -> None:
    async with fleet(
        placement={"policy": "least_loaded"}, deadlines={"step_gap_seconds": 3600}
    ) as on:
        busy, idle = on.engines
        await told(on, busy, running_sequences=5)
        for number in range(4):
            on.start([5], request_id=f"r{number}")
            await on.submitted(number + 1)
        assert (len(busy.submits), len(idle.submits)) == (0, 4)
        seen = await on.candidates("r3")
        assert {name: each.sequences for name, each in seen.items()} == {"one": 5, "two": 3}


async def test_learned_rates_reach_the_placement() -> None:
    async with fleet(*engines("one"), deadlines={"step_gap_seconds": 3600}) as on:
        (engine,) = on.engines
        on.serve(engine)
        for number in range(1, LOOKS):
            steps = number * 1_000_000
            await told(on, engine, running_sequences=1, step_count=steps, busy_seconds=number)
            await on.ask([5], request_id=f"r{number}")
            step_seconds = (await on.candidates(f"r{number}"))["one"].step_seconds
            if step_seconds < FALLBACK_STEP_SECONDS / 10:
                return
            await asyncio.sleep(LOOK_SECONDS)
        pytest.fail(f"a step is still thought to take {step_seconds} s")


async def test_returning_worker_starts_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as long_ago:
        long_ago.setattr(load_guard.LoadGuard, "joined", lambda *_: None)
        async with fleet(
            placement={"policy": "least_loaded"}, deadlines={"step_gap_seconds": 3600}
        ) as on:
            long_ago.undo()
            monkeypatch.setattr(load_guard, "SLOW_START_SECONDS", 3600.0)
            one, two = on.engines
            await two.hang_up()
            await eventually(lambda: len(two.hellos) == 2)
            await until_states(on.client, [READY, READY], [])
            await told(on, one, running_sequences=50)
            for number in range(6):
                on.start([5])
                await on.submitted(number + 1)
            # Slow start counts the idle worker as busy as the other.
            assert (len(one.submits), len(two.submits)) == (3, 3)


async def test_siblings_beyond_the_cap_avoid_the_first_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(monkeypatch, sibling_wait_seconds=60)
    async with fleet(
        *engines("one", "two", tokens_per_block=4), placement={"policy": "prefix_aware"}
    ) as on:
        on.start(*([*[5] * 12, tail] for tail in range(2 * MAX_TOGETHER)), request_id="r")
        # The two others wait for these.
        await on.submitted(2)
        assert [len(engine.submits) for engine in on.engines] == [1, 1]
        # Of the second leader, which went to the other worker.
        excluded = [each.excluded_by for each in (await on.candidates("r")).values()]
        assert sorted(excluded) == ["", "it has enough siblings of the item"]


async def test_dispatched_prompts_count_as_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "RECENT_SECONDS", 3600.0)
    async with fleet(
        *engines("one", "two", tokens_per_block=4), placement={"policy": "prefix_aware"}
    ) as on:
        on.start([5] * 9, request_id="before")
        home = await on.first()
        on.start([5] * 9, request_id="after")
        await on.submitted(2)
        seen = await on.candidates("after")
        assert seen[home.description.worker].cached_tokens == 8
        assert seen[on.other(home).description.worker].cached_tokens == 0
        assert len(home.submits) == 2


async def test_a_prompt_that_no_worker_takes_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = list[int]()

    def chain(root: int, token_ids: Any, size: int) -> list[int]:
        hashed.append(len(token_ids))
        return []

    monkeypatch.setattr(index, "chain", chain)
    some = engines("one", tokens_per_block=4, max_sequence_tokens=LONG_TOKENS + 1)
    async with fleet(*some, placement={"policy": "prefix_aware"}) as on:
        (told,) = await on.client.complete([[5] * (LONG_TOKENS + 1)], text=False, max_tokens=1)
        assert isinstance(told.error, PromptTooLong)
        assert not hashed
        on.start([5] * LONG_TOKENS, request_id="fits")
        await on.submitted(1)
        assert set(hashed) == {LONG_TOKENS}


async def test_blocks_of_a_lost_worker_are_forgotten() -> None:
    async with fleet(*engines("one", tokens_per_block=4)) as on:
        (engine,) = on.engines
        await eventually(lambda: any(c.HasField("kv_snapshot") for c in engine.commands))
        stored = epb.KvEvent(stored=epb.KvBlocksStored(block_hashes=[1, 2, 3]))
        snapshot = epb.KvEvents(epoch=1, events=[stored], snapshot=True)
        await engine.send(epb.EngineEvent(kv_events=snapshot))
        await eventually(lambda: on.client.gauge("kv_index_blocks") == 3)
        engine.refusal = "stays away"
        await engine.hang_up()
        await until_states(on.client, [admin_pb.WORKER_STATE_REFUSED], [])
        assert on.client.gauge("kv_index_blocks") == 0


async def expected_tokens(on: Fleet, request_id: str, model: str, **options: Any) -> int:
    """Expected new tokens of an item, from the score of the worker."""
    on.start([5], request_id=request_id, model=model, max_tokens=1000, **options)
    engine = next(engine for engine in on.engines if engine.description.model == model)
    await eventually(lambda: any(submit.request_id == request_id for submit in engine.submits))
    seen = (await on.candidates(request_id))[engine.description.worker]
    prompt_seconds = seen.wait_seconds + seen.prefill_seconds
    return round((seen.score - prompt_seconds) / seen.step_seconds)


async def test_output_lengths_are_learned_per_model() -> None:
    one, two = engines("one", model="m")[0], engines("two", model="n")[0]
    pair = {"num_return_sequences": 2, "temperature": 1.0, "seed": 1}
    async with fleet(one, two, placement={"policy": "power_of_two"}) as on:
        asked = on.ask([5], model="m", max_tokens=1000, **pair)
        (submit,) = await one.submitted()
        first, second = submit.handle, submit.handle + 1
        tokens = [7] * 300
        await one.step(
            (first, 0, tokens), (second, 0, tokens), ends=[(first, LENGTH), (second, LENGTH)]
        )
        assert (await asked)[0].usage.generated_tokens == 600
        expected = 0
        for number in range(LOOKS):
            expected = await expected_tokens(on, f"m{number}", "m")
            if expected != FALLBACK_NEW_TOKENS:
                break
            await asyncio.sleep(LOOK_SECONDS)
        assert expected == 300
        assert await expected_tokens(on, "pair", "m", **pair) == 600
        assert await expected_tokens(on, "n", "n") == FALLBACK_NEW_TOKENS


async def test_worker_replaced_at_its_address_is_in_the_snapshot() -> None:
    """Without a placement in between, both are reported together, in any order."""
    fleet = RouterFleet(PlacementSettings(policy="round_robin"), RouterMetrics(), HandoffSettings())
    addresses = [f"127.0.0.1:{port}" for port in range(1, 33)]
    for address in addresses:
        fleet.join(link(address))
    assert sorted(seen.address for seen in fleet.snapshot()) == sorted(addresses)
    for old in fleet.workers.values():
        old.leaving = True
    assert len(fleet.forget_leavers()) == len(addresses)
    for address in addresses:
        fleet.join(link(address))
    assert sorted(seen.address for seen in fleet.snapshot()) == sorted(addresses)
    assert not any(seen.problem == LEAVING for seen in fleet.snapshot())


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (Lora(id=3), True),
        (Lora(id=3, name="chosen by the client"), True),
        (Lora(id=3, version="v2"), True),
        (Lora(name="a"), True),
        (Lora(id=3, version="v1"), False),
        (Lora(name="a", version="v1"), False),
        (Lora(id=4), False),
        (Lora(name="b"), False),
        (Lora(), False),
    ],
)
async def test_adapter_is_found_as_its_workers_report_it(asked: Lora, found: bool) -> None:
    fleet, (worker,) = fleet_of(epb.WORKER_ROLE_MIXED)
    held = Adapter(3, "a", "v2")
    worker.guard.adapters_moved({(3, "v2"): Residency(held, rank=8)}, 0.0)
    fleet.touched.add(worker.address)
    assert fleet.reported_adapter("m", asked) == (ItemAdapter(held, rank=8) if found else None)
    assert fleet.reported_adapter("another", asked) is None
    assert fleet.reported_adapter("m", asked, removed={(3, "v2")}) is None
    (snapshot,) = fleet.snapshot()
    assert snapshot.adapters.holds(held)
    assert not snapshot.adapters.holds(Adapter(3, "a", "v1"))


async def test_change_before_the_wait_begins_is_not_missed() -> None:
    """An item finds no worker, and one becomes ready before the task that waits has run."""
    fleet = RouterFleet(PlacementSettings(), RouterMetrics(), HandoffSettings())
    waiting = asyncio.create_task(fleet.change(3600))
    fleet.changed()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await waiting


async def test_workers_are_read_for_placements_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    figures = LoadGuard.figures

    def counted(self: LoadGuard, *given: Any) -> Any:
        read.append(id(self))
        return figures(self, *given)

    async with fleet(*engines("one", "two", "three")) as on:
        for engine in on.engines:
            await told(on, engine, running_sequences=1)
        await asyncio.sleep(2 * WATCH_SECONDS)
        monkeypatch.setattr(LoadGuard, "figures", counted)
        await asyncio.sleep(10 * WATCH_SECONDS)
        assert not read
        on.start([5])
        await on.submitted(1)
        assert len({*read}) == len(on.engines)


async def test_worker_with_a_new_load_is_read_as_a_whole_worker_is() -> None:
    fleet, (worker,) = fleet_of(epb.WORKER_ROLE_MIXED)
    (before,) = fleet.snapshot()
    worker.guard.take_report(Report(1.0, running_sequences=3, used_blocks=50, total_blocks=100))
    worker.guard.book(100, 2, asyncio.get_running_loop().time())
    worker.last_turn = 7
    fleet.loaded.add(worker.address)
    (reloaded,) = fleet.snapshot()
    fleet.touched.add(worker.address)
    (whole,) = fleet.snapshot()
    assert reloaded._replace(warmth=0) == whole._replace(warmth=0) != before._replace(warmth=0)
