"""The handoff explored exhaustively, and with each of its rules broken.

What is explored: prefill worker, decode worker, router and their streams, in every order; crashes, breaks of each stream
(with and without the messages under way), cancels, failed reads, failed computations and full pools at every step;
timers at any time; reads that end as late as they like and find whatever the sender's memory holds then, unseen by the
checksum. Single messages lost or repeated on a stream that stays up are no fault of a real stream, so they have a bound.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from handoff.model import Bounds, Model
from handoff.mutations import MUTATIONS, Mutation
from handoff.search import Found, Graph, prove
from trtmesh.engine.handoff import receiver, sender
from trtmesh.router.fleet import handoff as router

KINDS = [
    Bounds(kind=kind, one_sided=one_sided)
    for kind in ("prefill", "move", "park")
    for one_sided in (True, False)
]


@pytest.mark.parametrize("bounds", KINDS, ids=lambda each: f"{each.kind}-{each.one_sided}")
def test_any_faults_end_without_timers(bounds: Bounds) -> None:
    """No bound on faults: expiry and deadlines may happen, but no end depends on them."""
    prove(Model(bounds), by_timers=False)


@pytest.mark.parametrize("bounds", KINDS, ids=lambda each: f"{each.kind}-{each.one_sided}")
def test_a_lost_or_repeated_message_ends_by_timers(bounds: Bounds) -> None:
    prove(Model(replace(bounds, faults=1, losses=1)), by_timers=True)


def test_two_handoffs_share_the_workers() -> None:
    """One block each, so that the second is refused or waits while the first has them."""
    bounds = Bounds(lanes=2, parts=1, faults=1, timers=False, local=False)
    prove(Model(bounds), by_timers=False)


def test_two_handoffs_at_once() -> None:
    bounds = Bounds(lanes=2, parts=1, faults=0, timers=False, local=False, blocks=2)
    prove(Model(bounds), by_timers=False)


def test_search_visits_every_phase_and_result() -> None:
    graph = prove(Model(Bounds()), by_timers=False)
    assert seen(graph, "receiver") == set(receiver.Phase) - {
        receiver.Phase.CONSUMED,
        receiver.Phase.CLOSED,
    }
    assert seen(graph, "sender") == set(sender.Phase) - {sender.Phase.CLOSED}
    handoffs = [graph.model.lane(world.lanes[0]).handoff for world in graph.worlds]
    assert {each.sender for each in handoffs if each} == set(router.Sender)
    assert {each.result for each in handoffs if each} == {None, router.Result.MOVED}


def seen(graph: Graph, party: str) -> set[object]:
    """The phases of a party's leases; ended leases leave the tables."""
    leases = [getattr(graph.model.lane(world.lanes[0]), party) for world in graph.worlds]
    return {lease.phase for lease in leases if lease is not None}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.rule)
def test_search_finds_a_broken_rule(mutation: Mutation) -> None:
    with pytest.raises(Found) as found:
        prove(Model(mutation.bounds, mutation.machines), by_timers=mutation.by_timers)
    assert mutation.finds in found.value.problem
