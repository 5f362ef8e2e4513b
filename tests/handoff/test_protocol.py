"""The handoff explored exhaustively, and with each of its rules broken.

Explored are both workers, the router and their streams in every order: crashes, breaks of streams with and without the
messages under way, cancels, failed reads and computations, and full pools at every step; timers at any time; reads that
end at any time and find whatever the sender's memory holds then, unnoticed by the checksum. A real stream loses and
repeats no single message, so these faults have a bound.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff.lane import Bounds
from handoff.model import Model
from handoff.mutations import MUTATIONS, Mutation
from handoff.search import Found, Graph, prove
from trtmesh.engine.handoff import receive_machine as receiving
from trtmesh.engine.handoff import send_machine as sending
from trtmesh.router.handoffs import machine as routing

pytestmark = pytest.mark.slow

KINDS = [
    *(
        Bounds(kind=kind, one_sided=one_sided, parts=1)
        for kind in ("prefill", "move", "park")
        for one_sided in (True, False)
    ),
    Bounds(kind="state"),
]


def name(bounds: Bounds) -> str:
    if bounds.by_state:
        return bounds.kind
    return f"{bounds.kind}-{'one_sided' if bounds.one_sided else 'streamed'}"


def of_each_kind(*every_run: str) -> pytest.MarkDecorator:
    """The kinds that every run explores, and the others, which `make soak` does too."""
    marked = [
        pytest.param(each, marks=[] if name(each) in every_run else [pytest.mark.soak])
        for each in KINDS
    ]
    return pytest.mark.parametrize("bounds", marked, ids=name)


@of_each_kind("prefill-one_sided", "state")
def test_any_faults_end_without_timers(bounds: Bounds) -> None:
    """No bound on faults: expiry and deadlines may happen, but no end depends on them."""
    prove(Model(bounds), by_timers=False)


@of_each_kind("move-streamed", "park-one_sided")
def test_a_fault_ends_without_timers(bounds: Bounds) -> None:
    prove(Model(replace(bounds, faults=1)), by_timers=False)


def test_a_fault_among_several_parts_ends_without_timers() -> None:
    """Of several parts the one-sided prefill has the most worlds; test_several_parts has the others, and timers beside
    a fault."""
    prove(Model(Bounds(faults=1, timers=False)), by_timers=False)


@of_each_kind("move-one_sided", "state")
def test_a_lost_or_repeated_message_ends_by_timers(bounds: Bounds) -> None:
    prove(Model(replace(bounds, faults=0, losses=1, parts=1)), by_timers=True)


@pytest.mark.soak
@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("kind", ["prefill", "move", "park"])
def test_several_parts(kind: str, one_sided: bool) -> None:
    """The receiver reads those of running sequences as those of a prefill, which every run explores with one fault."""
    bounds = Bounds(kind=kind, one_sided=one_sided)
    prove(Model(bounds), by_timers=False)
    prove(Model(replace(bounds, faults=0, losses=1)), by_timers=True)


@pytest.mark.soak
def test_halves_with_several_parts() -> None:
    prove(Model(Bounds(kind="halves")), by_timers=True)


@pytest.mark.parametrize("kind", [pytest.param("prefill", marks=pytest.mark.soak), "state"])
def test_a_lost_or_repeated_message_beside_another_fault(kind: str) -> None:
    prove(Model(Bounds(kind=kind, faults=1, losses=1)), by_timers=True)


def test_halves_that_a_client_brings_together_end_by_expiry() -> None:
    """The client owns the sender's lease between the halves, and may never return."""
    prove(Model(Bounds(kind="halves", faults=1, parts=1)), by_timers=True)
    with pytest.raises(Found) as found:
        prove(Model(Bounds(kind="halves", faults=0, parts=1)), by_timers=False)
    assert "the client takes the state" in str(found.value)


@pytest.mark.parametrize(
    ("kind", "faults"),
    [("prefill", 0), pytest.param("prefill", 1, marks=pytest.mark.soak), ("state", 1)],
)
def test_two_handoffs_share_the_workers(kind: str, faults: int) -> None:
    """One block each, so that the second is refused or waits while the first has them."""
    bounds = Bounds(kind=kind, lanes=2, parts=1, faults=faults, timers=False, local=False)
    prove(Model(bounds), by_timers=False)


@pytest.mark.parametrize("kind", [pytest.param("prefill", marks=pytest.mark.soak), "move"])
def test_two_handoffs_at_once(kind: str) -> None:
    bounds = Bounds(kind=kind, lanes=2, parts=1, faults=0, timers=False, local=False, blocks=2)
    prove(Model(bounds), by_timers=False)


def test_search_visits_every_phase_and_result() -> None:
    graph = prove(Model(Bounds(faults=1, parts=1, local=False)), by_timers=False)
    assert seen(graph, "receiver") == set(receiving.ReceiverPhase) - {
        receiving.ReceiverPhase.CONSUMED,
        receiving.ReceiverPhase.CLOSED,
    }
    assert seen(graph, "sender") == set(sending.SenderPhase) - {sending.SenderPhase.CLOSED}
    handoffs = [graph.model.lane(world.lanes[0]).handoff for world in graph.worlds]
    assert {each.sender for each in handoffs if each} == set(routing.Sender)
    assert {each.result for each in handoffs if each} == {None, routing.Result.MOVED}


def test_search_visits_every_phase_of_a_state() -> None:
    graph = prove(Model(Bounds(kind="state", faults=1)), by_timers=False)
    assert seen(graph, "sender") == set(sending.SenderPhase) - {sending.SenderPhase.CLOSED}
    lanes = [graph.model.lane(world.lanes[0]) for world in graph.worlds]
    assert {each.state for each in lanes} == {"", "taken", "continued"}
    results = {each.handoff.result for each in lanes if each.handoff}
    assert results == {None, routing.Result.MOVED}


def seen(graph: Graph, party: str) -> set[object]:
    """The phases of a party's leases; ended leases leave the tables."""
    leases = [getattr(graph.model.lane(world.lanes[0]), party) for world in graph.worlds]
    return {lease.phase for lease in leases if lease is not None}


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(each, marks=[pytest.mark.soak] if each.is_found_by_state else [])
        for each in MUTATIONS
    ],
    ids=lambda each: each.rule,
)
def test_search_finds_a_broken_rule(mutation: Mutation) -> None:
    with pytest.raises(Found) as found:
        prove(Model(mutation.bounds, mutation.machines), by_timers=mutation.by_timers)
    assert mutation.finds in found.value.problem
