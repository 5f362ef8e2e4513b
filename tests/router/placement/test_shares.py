"""Shares of adapters: decay, replicas with slack, and ranks apart only where that pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import AdapterNeed
from trtmesh.router.placement.rates import Line, Typical
from trtmesh.router.placement.shares import HALF_LIFE_SECONDS, SLACK, AdapterShares, replicas_of

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
