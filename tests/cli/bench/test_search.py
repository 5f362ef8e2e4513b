"""The search for the highest rate, over a queue whose truth is known: M/D/1, one server, constant service."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from cli.bench.runs import HEADER, answer
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.tools.bench.record import Run
from trtmesh.tools.bench.saturation import kendall_tau, knee, saturation, users_between
from trtmesh.tools.bench.search import REPEATS, Found, Goal, Trial, find, next_rate, wilson
from trtmesh.tools.bench.slo import parse_slos

SERVICE_S = 0.1


def queue(rate: float, seed: int, requests: int) -> Run:
    """Poisson arrivals at one server that answers a request in SERVICE_S, in virtual time."""
    draws, now, free, answers = random.Random(seed), 0.0, 0.0, []
    for index in range(requests):
        now += draws.expovariate(rate)
        free = max(now, free) + SERVICE_S
        answers.append(answer(index, (free,), planned_s=now))
    return Run(HEADER, tuple(answers))


def within(limit_s: float, rate: float) -> float:
    """The share of requests that are answered in time: Crommelin's distribution of waiting in M/D/1."""
    load, wait = rate * SERVICE_S, limit_s - SERVICE_S
    return (1 - load) * sum(
        (rate * (k * SERVICE_S - wait)) ** k
        / math.factorial(k)
        * math.exp(-rate * (k * SERVICE_S - wait))
        for k in range(int(wait / SERVICE_S) + 1)
    )


def true_rate(limit_s: float, attainment: float) -> float:
    low, high = 0.0, 1 / SERVICE_S
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(limit_s, middle) >= attainment else (low, middle)
    return low


@pytest.mark.parametrize(
    ("limit_ms", "attainment"),
    [(200, 0.9), pytest.param(300, 0.95, marks=pytest.mark.soak), (500, 0.99)],
)
async def test_the_rate_that_holds_is_that_of_the_queue(limit_ms: int, attainment: float) -> None:
    seeds = iter(range(1000))

    async def run_at(rate: float) -> Run:
        return queue(rate, next(seeds), 6000)

    goal = Goal(attainment, start=1.0, tolerance=0.02)
    found = await find(run_at, parse_slos([f"ttft:{limit_ms}"]), goal, lambda _: None)

    assert found.holds
    assert found.fails
    assert found.fails <= found.holds * 1.02
    assert found.holds == pytest.approx(true_rate(limit_ms / 1000, attainment), rel=0.05)


async def test_each_run_is_reported() -> None:
    async def run_at(rate: float) -> Run:
        return queue(rate, 1, 300)

    heard: list[Trial] = []
    found = await find(run_at, parse_slos(["ttft:200"]), Goal(0.9), heard.append)

    assert found.trials == heard
    assert heard[0].rate == 1.0


def search(holds: Callable[[float], bool], goal: Goal) -> Found:
    """Plans over a server that is either well or not."""
    trials: list[Trial] = []
    while not isinstance(step := next_rate(trials, goal), Found):
        trials.append(Trial(step, 10_000 if holds(step) else 0, 10_000, is_behind=False))
    return step


@given(st.floats(0.011, 9_000), st.floats(0.02, 1.0), st.floats(0.1, 1000))
def test_the_search_brackets_any_truth(truth: float, tolerance: float, start: float) -> None:
    found = search(lambda rate: rate <= truth, Goal(start=start, tolerance=tolerance, trials=60))

    assert found.holds is not None
    assert found.fails is not None
    assert found.holds <= truth < found.fails <= found.holds * (1 + tolerance)
    assert len({each.rate for each in found.trials}) == len(found.trials)


def test_a_server_that_always_holds_is_tried_at_the_highest_rate() -> None:
    found = search(lambda _: True, Goal(highest=50.0))

    assert (found.holds, found.fails) == (50.0, None)
    assert "highest" in found.why


def test_a_server_that_never_holds_is_tried_at_the_lowest_rate() -> None:
    found = search(lambda _: False, Goal(lowest=0.3))

    assert (found.holds, found.fails) == (None, 0.3)
    assert "lowest" in found.why


def test_the_search_ends_after_the_runs_that_are_allowed() -> None:
    found = search(lambda rate: rate <= 777, Goal(tolerance=1e-9, trials=12))

    assert len(found.trials) == 12
    assert "12 runs" in found.why


def test_an_open_rate_is_run_again_and_then_judged_by_all_its_runs() -> None:
    open_trial = Trial(1.0, 91, 100, is_behind=False)
    goal = Goal(0.9)

    assert next_rate([open_trial], goal) == 1.0
    assert next_rate([open_trial] * REPEATS, goal) == 2.0
    bad = Trial(1.0, 80, 100, is_behind=False)
    assert next_rate([open_trial, bad, bad], goal) == 0.5


def test_a_server_that_falls_behind_does_not_hold() -> None:
    """Its answers still meet the limit, for as long as the run was."""
    assert next_rate([Trial(1.0, 100, 100, is_behind=True)], Goal(0.9)) == 0.5


@given(st.integers(0, 200), st.integers(1, 200))
def test_wilsons_interval_includes_the_share(good: int, more: int) -> None:
    low, high = wilson(good, good + more)

    assert low + 1e-12 >= 0
    assert low <= good / (good + more) <= high <= 1


def test_an_overloaded_queue_is_seen_and_a_busy_one_is_not() -> None:
    """In 30 runs each: rising queues are found, and stationary ones at 80 % load are seldom taken for them."""
    behind = [
        [saturation(queue(load / SERVICE_S, seed, 1500).answers) for seed in range(30)]
        for load in (0.8, 1.3)
    ]
    busy, over = ([bool(each and each.is_behind) for each in runs] for runs in behind)

    assert sum(busy) <= 3
    assert all(over)
    slopes = [each.users_per_s for each in behind[1] if each]
    # Of 13 requests a second 10 are answered.
    assert sum(slopes) / len(slopes) == pytest.approx(3.0, rel=0.15)


def test_few_answers_show_no_trend() -> None:
    assert saturation(queue(20, 1, 40).answers) is None


def test_requests_under_way_are_counted_by_time() -> None:
    answers = [answer(0, (4.0,), planned_s=0.0), answer(1, (3.0,), planned_s=1.0)]

    users = users_between(answers, np.array([0.0, 1.0, 2.0, 4.0, 5.0]))

    assert users.tolist() == pytest.approx([1.0, 2.0, 1.5, 0.0])


def test_kendalls_tau_is_one_for_a_rise() -> None:
    assert kendall_tau(np.arange(5.0)) == 1
    assert kendall_tau(-np.arange(5.0)) == -1
    assert kendall_tau(np.ones(5)) == 0


def test_the_knee_is_where_the_curve_bends() -> None:
    curve = [(1.0, 10.0), (2.0, 10.5), (4.0, 11.0), (8.0, 12.0), (8.5, 40.0), (8.6, 80.0)]

    assert knee(curve) == 3
    assert knee(list(reversed(curve))) == 2
    assert knee([(1, 1), (2, 2), (3, 3)]) is None
    assert knee(curve[:2]) is None


def test_the_knee_of_a_server_that_does_less_under_more_load_is_before() -> None:
    assert knee([(104, 8.6), (350, 10.0), (760, 17.5), (703, 77.0)]) == 2
