"""Lateness, obstacles and the budget of second copies, by tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trtmesh.router.hedging.lateness import (
    KEPT,
    LEAST_FIRST_MARGIN,
    LEAST_STEP_MARGIN,
    MOST_STEP_MARGIN,
    RECENT,
    Budget,
    Cause,
    Obstacle,
    Peer,
    Seen,
    StepPace,
    Wastes,
    copy_price,
    first_margin,
    is_slow,
    least,
    obstacles,
    step_margin,
    text,
)


def seen(*seconds: float) -> Seen:
    found = Seen()
    for each in seconds:
        found.add(each)
    return found


@pytest.mark.parametrize(
    ("gaps", "longest", "usual"),
    [
        ([0.01] * 19, None, None),
        ([0.01] * 20, 0.01, None),
        ([0.01] * 32, 0.01, 0.01),
        # One stall in five seconds is not the rule.
        ([0.01] * 511 + [2.0], 0.01, 0.01),
        ([0.01] * 500 + [2.0] * 12, 2.0, 0.01),
        # What was long ago is forgotten.
        ([2.0] * 600 + [0.01] * KEPT, 0.01, 0.01),
        ([0.01] * 480 + [0.1] * RECENT, 0.1, 0.1),
    ],
)
def test_pace_is_what_was_seen_last(
    gaps: list[float], longest: float | None, usual: float | None
) -> None:
    found = seen(*gaps)
    assert (found.quantile(0.99), found.usual()) == (longest, usual)
    assert len(found) <= KEPT


@pytest.mark.parametrize(
    ("own", "peers", "margin"),
    [
        (None, [], None),
        (None, [None], None),
        (0.04, [], 0.12),
        # A new worker has the fleet's.
        (None, [0.04, 0.05, 0.5], 0.15),
        # A regular worker in an irregular fleet may be as irregular, and the other way round.
        (0.02, [0.1], 0.3),
        (0.1, [0.02], 0.3),
        (0.001, [0.001], LEAST_STEP_MARGIN),
        (2.0, [0.01], MOST_STEP_MARGIN),
    ],
)
def test_step_is_late_by_what_was_learned(
    own: float | None, peers: list[float | None], margin: float | None
) -> None:
    found = step_margin(StepPace(longest=own), [StepPace(longest=each) for each in peers])
    assert found == (margin if margin is None else pytest.approx(margin))


@pytest.mark.parametrize(
    ("own", "peers", "slow"),
    [
        (0.1, [0.01, 0.01], True),
        (0.024, [0.01, 0.01], False),
        (0.026, [0.01, 0.01], True),
        (0.1, [0.1, 0.1, 0.01], False),
        (0.1, [], False),
        (0.1, [None], False),
        (None, [0.01], False),
    ],
)
def test_worker_is_slow_beside_its_peers(
    own: float | None, peers: list[float | None], slow: bool
) -> None:
    assert is_slow(StepPace(usual=own), [StepPace(usual=each) for each in peers]) is slow


def test_first_token_is_late_beyond_usual_waits() -> None:
    assert first_margin(seen(*[0.2] * 19)) is None
    assert first_margin(seen(*[0.001] * 100)) == LEAST_FIRST_MARGIN
    # Items that meet a stalled worker, three of a hundred, make no long wait usual.
    assert first_margin(seen(*[0.1] * 97, *[2.0] * 3)) == pytest.approx(0.2)
    # Where everybody waits, nobody is late.
    assert first_margin(seen(*[1.0] * 100)) == pytest.approx(2.0)


WELL = Peer("a", {"model": "m", "device": "f"}, True, True, False, 3, 8, 0, 0.0, 0.2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"kind": {"model": "m", "device": "g"}}, Obstacle.OTHER_KIND),
        ({"is_exact": False}, Obstacle.NOT_EXACT),
        ({"is_ready": False}, Obstacle.UNREADY),
        ({"is_late": True}, Obstacle.LATE),
        ({"used_share": 0.95}, Obstacle.KV_FULL),
        ({"sequences": 8}, Obstacle.BUSY),
        ({"sequences": 800, "most_running": 0}, None),
        ({"waiting": 1, "most_running": 0}, Obstacle.BUSY),
        # It was submitted during a step.
        ({"waiting": 1}, None),
        ({"wait_seconds": 0.2}, Obstacle.BUSY),
        ({"is_exact": False, "wait_seconds": 1.0}, Obstacle.NOT_EXACT),
    ],
)
def test_peer_takes_no_copies_because(change: dict[str, Any], why: Obstacle | None) -> None:
    other = replace(WELL, address="b", **change)
    expected = {"a": Obstacle.ALONE} | ({"b": why} if why else {})
    assert obstacles(WELL, [WELL, other]) == expected
    assert why is None or why.text


def test_what_differs_is_told() -> None:
    other = replace(WELL, address="b", kind={"model": "m", "device": "g", "more": "1"})
    told = "it is not exact with the first worker: another device, more"
    assert text(Obstacle.OTHER_KIND, WELL, other) == told
    assert text(Obstacle.BUSY, WELL, other) == Obstacle.BUSY.text


def test_inexact_worker_is_not_left_either() -> None:
    first = replace(WELL, is_exact=False)
    assert obstacles(first, [first, replace(WELL, address="b")])["b"] is Obstacle.NOT_EXACT


def test_refusal_names_the_least_hopeless_obstacle() -> None:
    assert least([Obstacle.NOT_EXACT, Obstacle.BUSY, Obstacle.LATE]) is Obstacle.BUSY
    assert least([]) is Obstacle.ALONE


def test_copy_costs_the_time_of_its_prompt() -> None:
    # 1,000 tokens take 50 ms: five steps of 10 ms, each with the tokens of four sequences.
    assert copy_price(1000, 0.00005, 0.01, 4) == pytest.approx(20)
    # Never more than its tokens.
    assert copy_price(10, 1.0, 0.001, 100) == 10


def test_budget_is_a_share_of_what_was_delivered() -> None:
    budget = Budget(0.02)
    budget.spend(budget.tokens)
    assert budget.free == 0
    budget.earn(500)
    assert budget.free == pytest.approx(10)
    # What is on its way when a copy is stopped is paid before the next copy.
    budget.spend(15)
    budget.earn(200)
    assert budget.free == pytest.approx(-1)
    budget.earn(10**9)
    assert budget.free == Budget.MOST


def test_copies_reserve_their_waste_and_have_what_is_left_beyond() -> None:
    budget = Budget(0.02)
    one, other = budget.reserve(20), budget.reserve(30)
    assert budget.free == Budget.FIRST - 50 == 14
    assert one.covers(20 + 14)
    assert not one.covers(20 + 15)
    one.spend(4)
    assert budget.free == 14
    other.spend(40)
    assert budget.free == 4
    assert one.covers(16 + 4)
    assert not one.covers(16 + 5)
    other.end()
    one.end()
    assert budget.free == Budget.FIRST - 44
    # An overdrawn budget takes no reserve away.
    last = budget.reserve(20)
    budget.spend(10)
    assert last.covers(20)
    assert not last.covers(21)


def test_expected_waste_is_that_of_the_cause() -> None:
    wastes = Wastes()
    assert wastes.expected(Cause.SLOW) == Wastes.FIRST
    for number in range(100):
        wastes.add(Cause.SLOW, number)
        wastes.add(Cause.STALL, 0)
    assert wastes.expected(Cause.SLOW) == 90
    assert wastes.expected(Cause.STALL) == 0
    assert wastes.expected(Cause.FIRST_TOKEN) == Wastes.FIRST
    for _ in range(KEPT):
        wastes.add(Cause.SLOW, 10**6)
    assert wastes.expected(Cause.SLOW) == Wastes.MOST
