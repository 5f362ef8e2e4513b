"""Shares of adapters: decay, replicas with slack, and ranks apart only where that pays."""

from __future__ import annotations

import random

import pytest
from counting import counted_lines
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import AdapterNeed
from trtmesh.router.placement.rates import Line, Typical
from trtmesh.router.placement.shares import (
    HALF_LIFE_SECONDS,
    SLACK,
    AdapterShares,
    Hottest,
    replicas_of,
)

TAKERS = tuple((f"w{n}", 16) for n in range(8))
CHEAP_RANKS = Typical(step=Line(0.02, 0.0, 8.0, 0.0, 16.0))
DEAR_RANKS = Typical(step=Line(0.02, 0.0, 8.0, 0.0002, 16.0))


def adapter(number: int, rank: int = 8) -> AdapterNeed:
    return AdapterNeed(Adapter(number, "", "v1"), rank, deliverable=True)


def replicas(shares: AdapterShares, number: int) -> int:
    return shares.outlook(adapter(number), CHEAP_RANKS).replicas


def test_share_halves_while_others_take_over() -> None:
    shares = AdapterShares()
    shares.add(adapter(1), 4.0, 100.0)
    assert shares.share(1) == 1.0
    shares.add(adapter(2), 2.0, 100.0 + HALF_LIFE_SECONDS)
    assert shares.share(1) == pytest.approx(0.5)
    shares.add(None, 4.0, 100.0 + HALF_LIFE_SECONDS)
    assert shares.share(1) == pytest.approx(0.25), "load without an adapter is load"
    shares.add(adapter(2), 1.0, 1e9)
    assert shares.share(1) < 1e-9
    assert shares.share(3) == 0.0


def test_replicas_grow_and_shrink_with_the_share() -> None:
    shares = AdapterShares()
    shares.settle(TAKERS, CHEAP_RANKS)
    assert replicas(shares, 1) == 1
    shares.add(adapter(1), 6.0, 0.0)
    shares.add(adapter(2), 10.0, 0.0)
    shares.settle(TAKERS, CHEAP_RANKS)
    assert (replicas(shares, 1), replicas(shares, 2)) == (3, 5)
    shares.add(adapter(2), 200.0, 3 * HALF_LIFE_SECONDS)
    shares.settle(TAKERS, CHEAP_RANKS)
    assert (replicas(shares, 1), replicas(shares, 2)) == (1, 8)


@given(st.floats(0.0, 1.0), st.integers(1, 64), st.integers(1, 64))
def test_replicas_cover_the_share_and_settle(share: float, workers: int, before: int) -> None:
    now = replicas_of(share, workers, before)
    assert 1 <= now <= workers
    assert now >= min(workers, share * workers)
    assert replicas_of(share, workers, now) == now


@given(st.floats(0.0, 0.9), st.integers(1, 64), st.floats(0.0, 1.0))
def test_replicas_do_not_flap(share: float, workers: int, part: float) -> None:
    """A share that falls by less than the slack gives up no replica that it needed."""
    least = replicas_of(share, workers, 1)
    fallen = max(0.0, share - part * 0.99 * SLACK / workers)
    assert replicas_of(fallen, workers, least) == least or fallen * workers + SLACK <= least - 1


def test_ranks_are_kept_apart_only_where_a_step_pays_for_it() -> None:
    shares = AdapterShares()
    for number, rank in enumerate((8, 16, 128, 128)):
        shares.add(adapter(number, rank), 1.0, 0.0)
    shares.settle(TAKERS, CHEAP_RANKS)
    assert shares.outlook(adapter(2, 128), CHEAP_RANKS).stretch == (0.0, 1.0)
    shares.settle(TAKERS, DEAR_RANKS)
    assert shares.outlook(adapter(2, 128), DEAR_RANKS).stretch == (0.5, 1.0)
    assert shares.outlook(adapter(9, 0), DEAR_RANKS).stretch == (0.0, 1.0), "unknown rank"
    # A shift of less than half a worker moves nothing.
    shares.add(adapter(2, 128), 0.3, 0.0)
    shares.settle(TAKERS, DEAR_RANKS)
    assert shares.outlook(adapter(2, 128), DEAR_RANKS).stretch == (0.5, 1.0)
    shares.add(adapter(2, 128), 4.0, 0.0)
    shares.settle(TAKERS, DEAR_RANKS)
    assert shares.outlook(adapter(2, 128), DEAR_RANKS).stretch[0] < 0.3
    homes = {n: shares.outlook(adapter(n), DEAR_RANKS).homes for n in range(4)}
    assert not {*homes[0]} & {*homes[2]}


def test_the_hottest_are_those_of_most_weight_however_weights_rise() -> None:
    chance = random.Random(5)
    weights: dict[int, tuple[float, int]] = {}
    hottest = Hottest(8, weights)
    for _ in range(3000):
        number = int(chance.paretovariate(0.5)) % 50
        weights[number] = weights.get(number, (0.0, 0))[0] + chance.random(), 0
        hottest.rose(number)
        most = sorted(weights, key=lambda each: (weights[each][0], each), reverse=True)[:8]
        assert hottest.in_order() == most == Hottest(8, weights).in_order()


def test_counting_an_item_costs_as_much_with_ten_thousand_adapters() -> None:
    costs = []
    for count in (500, 10_000):
        shares, takers = AdapterShares(), tuple((f"w{n}:1", 4) for n in range(8))
        for number in range(count):
            shares.add(adapter(number), 1.0 + number, 0.0)
        shares.settle(takers, CHEAP_RANKS)
        with counted_lines() as lines:
            for number in range(0, count, count // 50):
                shares.add(adapter(number), 1.0, 0.0)
                shares.settle(takers, CHEAP_RANKS)
        costs.append(lines.count)
        with counted_lines() as lines:
            shares.settle(takers, CHEAP_RANKS)
        assert lines.count < 10, "nothing was counted"
    few, many = costs
    assert many < 1.1 * few
