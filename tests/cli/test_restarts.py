from __future__ import annotations

import itertools

from trtmesh.cli.restarts import LONGEST_DELAY_SECONDS, WINDOW_SECONDS, RestartBudget


def test_the_delay_doubles_while_restarts_are_frequent() -> None:
    budget = RestartBudget(most_per_minute=100)
    assert [budget.take(now=100.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_a_quiet_minute_forgets() -> None:
    budget = RestartBudget(most_per_minute=100)
    first = budget.take(now=0.0)
    budget.take(now=1.0)
    assert budget.take(now=2 * WINDOW_SECONDS) == first


def test_no_window_has_more_restarts_than_allowed() -> None:
    """A process that dies as soon as it was started."""
    budget = RestartBudget(most_per_minute=3)
    now, starts = 0.0, []
    for _ in range(20):
        now += budget.take(now)
        starts.append(now)
    windows = [[t for t in starts if begin <= t < begin + WINDOW_SECONDS] for begin in starts]
    assert max(map(len, windows)) == 3
    assert max(b - a for a, b in itertools.pairwise(starts)) > LONGEST_DELAY_SECONDS
