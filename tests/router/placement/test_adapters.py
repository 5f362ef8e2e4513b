"""Placement of items with an adapter, as properties of pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router.placement.test_place import worker
from trtmesh.chassis.errors import AdapterNotFound, NoWorker
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.doors.admin.descriptions import describe_decision
from trtmesh.router.placement import (
    AdapterNeed,
    Place,
    PlacementQuery,
    Residency,
    WorkerAdapters,
    WorkerSnapshot,
    place,
)
from trtmesh.router.placement.adapters import adapter_seconds, bound, takers_of
from trtmesh.router.placement.filters import SLOTS_TAKEN
from trtmesh.router.placement.homes import order_of
from trtmesh.router.placement.place import CandidateAdapter, DecisionRecord
from trtmesh.router.placement.residency import AdapterOutlook, Use
from trtmesh.router.values.persistent_map import PersistentMap
from trtmesh.v1 import engine_pb2 as epb

POLICIES = ("lora_aware", "auto")
SLOTS = 4
PLACES = st.sampled_from([None, Place.HOST, Place.DEVICE])
FLEETS = st.lists(st.tuples(st.integers(0, 60), PLACES), min_size=1, max_size=8)


def need(number: int = 7, rank: int = 8, **outlook: Any) -> AdapterNeed:
    return AdapterNeed(
        Adapter(number, "", "v1"), rank, deliverable=True, outlook=AdapterOutlook(**outlook)
    )


def query(wanted: AdapterNeed, **changes: Any) -> PlacementQuery:
    fields: dict[str, Any] = {"prompt_tokens": 10, "new_tokens": 10, **changes}
    return PlacementQuery("m", frozenset({"sampling.top_k"}), adapter=wanted, **fields)


def adapters(wanted: AdapterNeed, at: Place | None, **known: Any) -> WorkerAdapters:
    held = {wanted.key: Residency(wanted.adapter, at, wanted.rank)} if at else {}
    return WorkerAdapters(PersistentMap(held), slots=SLOTS, free_slots=SLOTS, **known)


def fleet_of(states: list[tuple[int, Place | None]], wanted: AdapterNeed) -> list[WorkerSnapshot]:
    return [
        worker(f"w{n}", sequences=sequences, adapters=adapters(wanted, at), step_seconds=0.01)
        for n, (sequences, at) in enumerate(states)
    ]


@pytest.mark.parametrize("policy", POLICIES)
@given(states=FLEETS, number=st.integers(0, 2**63), draw=st.integers(0, 2**32 - 1))
def test_load_stays_within_the_bound_and_no_adapter_is_left_without_a_worker(
    policy: str, states: list[tuple[int, Place | None]], number: int, draw: int
) -> None:
    wanted = need(number)
    fleet = fleet_of(states, wanted)
    asked = query(wanted, draw=draw)
    chosen = place(policy, fleet, asked).chosen
    assert chosen.sequences + 1 <= bound([w.sequences for w in fleet], 1)
    assert place(policy, fleet, asked).chosen == chosen


@pytest.mark.parametrize("policy", POLICIES)
@given(
    states=FLEETS, number=st.integers(0, 2**63), draws=st.tuples(*[st.integers(0, 2**32 - 1)] * 2)
)
def test_routers_with_equal_views_agree_on_the_home(
    policy: str, states: list[tuple[int, Place | None]], number: int, draws: tuple[int, int]
) -> None:
    wanted = need(number)
    fleet = fleet_of(states, wanted)
    first, second = (place(policy, fleet, query(wanted, draw=draw)).chosen for draw in draws)
    assert first == second
    renewed = replace(wanted, adapter=Adapter(number, "", "v2"))
    takers = takers_of(fleet, "m")
    empty = [w._replace(adapters=adapters(wanted, None), sequences=0) for w in fleet]
    home = order_of(takers, number)[0]
    assert place(policy, empty, query(wanted)).chosen.address == home
    assert place(policy, empty, query(renewed)).chosen.address == home, "a new version stays"


@pytest.mark.parametrize("policy", POLICIES)
@given(
    holder=st.integers(0, 7), at=st.sampled_from([Place.HOST, Place.DEVICE]), number=st.integers(0)
)
def test_holder_is_preferred_to_a_load(policy: str, holder: int, at: Place, number: int) -> None:
    wanted = need(number % 2**63)
    fleet = fleet_of([(3, at if n == holder else None) for n in range(8)], wanted)
    decision = place(policy, fleet, query(wanted))
    assert decision.chosen is fleet[holder]


@pytest.mark.parametrize("policy", POLICIES)
def test_hot_adapter_spills_to_a_holder_before_another_worker_loads_it(policy: str) -> None:
    wanted = need()
    order = order_of(takers_of(fleet_of([(0, None)] * 4, wanted), "m"), 7)
    fleet = {w.address: w for w in fleet_of([(2, None)] * 4, wanted)}
    fleet[order[0]] = fleet[order[0]]._replace(
        sequences=60, adapters=adapters(wanted, Place.DEVICE)
    )
    assert place(policy, [*fleet.values()], query(wanted)).chosen.address == order[1]
    fleet[order[3]] = fleet[order[3]]._replace(adapters=adapters(wanted, Place.HOST))
    assert place(policy, [*fleet.values()], query(wanted)).chosen.address == order[3]


@pytest.mark.parametrize("policy", POLICIES)
def test_replicas_share_the_load(policy: str) -> None:
    states: list[tuple[int, Place | None]] = [(0, Place.DEVICE)] * 4
    homes = ("w1:1", "w3:1")
    wanted = need(homes=homes)
    fleet = fleet_of(states, wanted)
    taken = []
    for turn in range(1, 9):
        chosen = place(policy, fleet, query(wanted)).chosen
        taken.append(chosen.address)
        index = fleet.index(chosen)
        fleet[index] = chosen._replace(last_turn=turn)
    assert {home: taken.count(home) for home in homes} == dict.fromkeys(homes, 4)


@pytest.mark.parametrize("policy", POLICIES)
def test_worker_full_of_others_is_passed_over_while_another_can_take_the_item(policy: str) -> None:
    wanted = need(homes=("a:1",))
    others = PersistentMap({(n, "v"): Use(1, 8) for n in range(SLOTS)})
    full = WorkerAdapters(slots=SLOTS, evictable_slots=SLOTS, in_use=others)
    decision = place(policy, [worker("a", adapters=full), worker("b", sequences=9)], query(wanted))
    assert decision.chosen.worker == "b"
    assert decision.excluded_by == [SLOTS_TAKEN, ""]
    assert place(policy, [worker("a", adapters=full)], query(wanted)).chosen.worker == "a"
    reported = WorkerAdapters(slots=SLOTS, free_slots=0, evictable_slots=0)
    assert reported.is_full(wanted)
    assert not replace(reported, evictable_slots=1).is_full(wanted)
    assert not replace(reported, in_use=PersistentMap({wanted.key: Use(1, 8)})).is_full(wanted)
    assert not adapters(wanted, Place.DEVICE, in_use=others).is_full(wanted)


@pytest.mark.parametrize("policy", POLICIES)
def test_version_that_cannot_be_delivered_waits_for_a_holder(policy: str) -> None:
    wanted = replace(need(), deliverable=False)
    fleet = fleet_of([(0, None), (60, Place.HOST)], wanted)
    assert place(policy, fleet, query(wanted)).chosen is fleet[1]
    ready = fleet[0]
    for known_model in ("", "m"):
        away = worker("away", model=known_model, problem="it does not answer")
        with pytest.raises(NoWorker):
            place(policy, [ready, away], query(wanted))
    with pytest.raises(NoWorker):
        place(policy, fleet, query(wanted, exclude={fleet[1].address: "draining"}))
    hopeless = (
        worker("other", model="another"),
        worker("other", model="another", problem="it does not answer"),
        worker("short", max_sequence_tokens=5),
        worker("lacks", supported_fields=frozenset(), problem="draining"),
    )
    for other in hopeless:
        with pytest.raises(AdapterNotFound) as evicted:
            place(policy, [ready, other], query(wanted))
        assert (evicted.value.field, evicted.value.value) == ("lora.id", "7")


def test_load_of_an_adapter_costs_what_remains_of_it() -> None:
    wanted = need(delivery_seconds=2.0, copy_seconds=0.5)
    on_way = PersistentMap({wanted.key: Use(1, 8)})
    elsewhere = PersistentMap({(1, "v"): Use(1, 8)})
    costs = {
        0.0: adapters(wanted, Place.DEVICE),
        0.5: adapters(wanted, Place.HOST),
        1.0: adapters(wanted, None, in_use=on_way),
        2.0: adapters(wanted, None),
        4.0: adapters(wanted, None, in_use=elsewhere, deliveries=1),
    }
    for seconds, at in costs.items():
        assert adapter_seconds(worker("a", adapters=at), wanted) == seconds


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_of_a_kind_go_together_where_the_load_allows(policy: str) -> None:
    wanted = need(rank=128, rank_step_seconds=0.001, homes=("w0:1", "w1:1"))
    fleet = fleet_of([(4, Place.DEVICE), (5, Place.DEVICE)], wanted)
    fleet = [
        w._replace(adapters=replace(w.adapters, rank=rank))
        for w, rank in zip(fleet, (8, 128), strict=True)
    ]
    assert place(policy, fleet, query(wanted)).chosen is fleet[1]
    busy = [fleet[0], fleet[1]._replace(sequences=60)]
    assert place(policy, busy, query(wanted)).chosen is busy[0]


def test_decision_tells_what_the_adapter_contributed() -> None:
    wanted = need(delivery_seconds=2.0, copy_seconds=0.5)
    fleet = fleet_of([(0, None), (0, Place.HOST), (0, Place.DEVICE)], wanted)
    decision = place("lora_aware", fleet, query(wanted))
    told = {c.worker.address: c.adapter for c in decision.candidates}
    order = order_of(takers_of(fleet, "m"), 7)
    assert told == {
        "w0:1": CandidateAdapter(None, 2.0, order.index("w0:1") + 1),
        "w1:1": CandidateAdapter(Place.HOST, 0.5, order.index("w1:1") + 1),
        "w2:1": CandidateAdapter(Place.DEVICE, 0.0, order.index("w2:1") + 1),
    }
    message = describe_decision(DecisionRecord("anonymous", "r", 0, "first", decision))
    assert (message.adapter, message.adapter_version, message.adapter_rank) == ("7", "v1", 8)
    assert message.adapter_replicas == 1
    best = message.candidates[0]
    assert (best.worker, best.adapter_place) == ("w2", epb.ADAPTER_PLACE_DEVICE)
    assert message.candidates[-1].adapter_place == epb.ADAPTER_PLACE_ABSENT
    assert message.candidates[-1].adapter_seconds == 2.0
    without = place("lora_aware", fleet, query(wanted)._replace(adapter=None))
    message = describe_decision(DecisionRecord("anonymous", "r", 0, "first", without))
    assert not message.adapter
    assert {c.adapter_place for c in message.candidates} == {epb.ADAPTER_PLACE_UNSPECIFIED}
