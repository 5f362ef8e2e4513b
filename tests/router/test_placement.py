"""Placement is a pure function of a snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from trtmesh.chassis.errors import NoWorker, UnsupportedField
from trtmesh.router.placement import POLICIES, PlacementQuery, WorkerSnapshot, place

QUERY = PlacementQuery("m", frozenset({"sampling.top_k"}))


def worker(name: str, **changes: Any) -> WorkerSnapshot:
    values: dict[str, Any] = {
        "address": f"{name}:1",
        "worker": name,
        "model": "m",
        "problem": "",
        "sequences": 0,
        "supported_fields": frozenset({"sampling.top_k"}),
        "last_turn": 0,
    }
    return WorkerSnapshot(**values | changes)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "unfit",
    [{"problem": "draining"}, {"model": "other"}, {"supported_fields": frozenset()}],
)
def test_an_unfit_worker_is_never_chosen(policy: str, unfit: dict[str, Any]) -> None:
    decision = place(policy, [worker("a", **unfit), worker("b", sequences=99, last_turn=9)], QUERY)
    assert decision.chosen.worker == "b"
    assert [bool(candidate.excluded_by) for candidate in decision.candidates] == [True, False]


def test_least_loaded_takes_the_worker_with_the_least_to_do() -> None:
    fleet = [worker("a", sequences=3), worker("b", sequences=1), worker("c", sequences=2)]
    assert place("least_loaded", fleet, QUERY).chosen.worker == "b"


def test_equals_take_turns() -> None:
    for policy in POLICIES:
        fleet = [worker("a", last_turn=2), worker("b", last_turn=1), worker("c", last_turn=3)]
        assert place(policy, fleet, QUERY).chosen.worker == "b"


def test_round_robin_does_not_look_at_the_load() -> None:
    fleet = [worker("a", sequences=100, last_turn=1), worker("b", last_turn=2)]
    assert place("round_robin", fleet, QUERY).chosen.worker == "a"


def test_no_worker_names_every_worker_and_its_problem() -> None:
    fleet = [worker("a", problem="it is draining"), worker("b", model="other")]
    with pytest.raises(NoWorker) as told:
        place("least_loaded", fleet, QUERY)
    assert "a: it is draining; b: serves model other" in told.value.message
    assert told.value.retry_after_ms
    with pytest.raises(NoWorker, match="none is known"):
        place("least_loaded", [], QUERY)


def test_a_field_that_no_worker_has_is_named() -> None:
    fleet = [worker("a", supported_fields=frozenset({"priority"}))]
    with pytest.raises(UnsupportedField, match=r"sampling\.top_k"):
        place("least_loaded", fleet, QUERY)
