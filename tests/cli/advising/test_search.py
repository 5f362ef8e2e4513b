"""The fewest engines, beside every other number of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cli.advising.loads import LOADS, MODEL
from trtmesh.tools.advising.forecast import Counts, Forecast, forecast, simulated_slos
from trtmesh.tools.advising.search import Search
from trtmesh.tools.fleet_replay.trace import Arrival

ATTAINMENT = 0.95
MOST = 24


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("items", [60, pytest.param(240, marks=pytest.mark.soak)])
def test_advice_is_within_one_engine_of_the_optimum(name: str, items: int) -> None:
    load, slo = LOADS[name]
    probe = Known(load(items), slo)
    search = Search(probe, ATTAINMENT, MOST)
    mixed = search.mixed()
    assert mixed
    least = next(n for n in range(1, MOST) if search.holds(probe(Counts(n))))
    assert least <= mixed.counts.total <= least + 1
    limit = mixed.counts.total + 2
    halves = search.disaggregated(limit)
    totals = [
        total
        for total in range(2, limit + 1)
        if any(search.holds(probe(Counts(0, n, total - n))) for n in range(1, total))
    ]
    if totals:
        assert halves
        assert totals[0] <= halves.counts.total <= totals[0] + 1
    else:
        assert halves is None


class Known:
    """Forecasts of a load, each made once for the search and the test."""

    def __init__(self, arrivals: list[Arrival], slo: str) -> None:
        self._arrivals = arrivals
        self._slos = simulated_slos([slo])
        self._made: dict[Counts, Forecast] = {}

    def __call__(self, counts: Counts) -> Forecast:
        if counts not in self._made:
            self._made[counts] = forecast(self._arrivals, MODEL, counts, self._slos)
        return self._made[counts]


def scripted(good: Callable[[Counts], float], busy: float = 0.9) -> Search:
    def probe(counts: Counts) -> Forecast:
        return Forecast(counts, good(counts), {}, {"mixed": busy}, 0.0, 1.0)

    return Search(probe, 0.99, 256)


@pytest.mark.parametrize("least", [1, 2, 3, 17, 200, 256])
@pytest.mark.parametrize("guess", [1, 20, 10_000])
def test_bisection_finds_the_least_number(least: int, guess: int) -> None:
    search = scripted(lambda counts: 1.0 if counts.mixed >= least else 0.5)
    found = search.mixed(guess)
    assert found
    assert found.counts == Counts(least)
    assert len(search.probes) <= 17


def test_nothing_is_advised_where_no_number_will_do() -> None:
    assert scripted(lambda _: 0.5).mixed() is None
    hopeless = scripted(lambda _: 0.5, busy=0.01)
    assert hopeless.mixed() is None
    assert len(hopeless.probes) == 2


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 9), (2, 17), (13, 3), (20, 20)])
def test_best_division_is_found_among_many(prefill: int, decode: int) -> None:
    def good(counts: Counts) -> float:
        return min(counts.prefill / prefill, counts.decode / decode, 1.0)

    search = scripted(good)
    found = search.disaggregated(64)
    assert found
    assert found.counts == Counts(0, prefill, decode)
    assert search.disaggregated(prefill + decode - 1) is None
    assert len(search.probes) < 120
