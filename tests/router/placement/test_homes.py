"""Homes of adapters: rendezvous hashing with bounded loads."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.router.placement.homes import BOUND, AdapterLoad, Takers, homes_of, order_of

SHARES = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=60)


def takers(count: int, slots: int = 16) -> Takers:
    return tuple((f"10.0.0.{n}:1", slots) for n in range(count))


def loads_of(shares: list[float]) -> list[AdapterLoad]:
    total = sum(shares)
    return [AdapterLoad(n, share / total) for n, share in enumerate(sorted(shares, reverse=True))]


@given(SHARES, st.integers(1, 9))
def test_bound_is_exceeded_only_where_no_worker_is_within(shares: list[float], count: int) -> None:
    workers, most = takers(count), BOUND / count
    taken = dict.fromkeys((address for address, _ in workers), 0.0)
    loads = loads_of(shares)
    homes = homes_of(loads, workers, {})
    for load in loads:
        (home,) = homes[load.adapter]
        if taken[home] + load.share > most:
            assert min(taken.values()) + load.share > most
        taken[home] += load.share


@given(SHARES, st.integers(1, 9), st.permutations(range(9)))
def test_order_of_workers_does_not_matter(
    shares: list[float], count: int, order: list[int]
) -> None:
    workers = takers(count)
    shuffled = tuple(workers[n] for n in order if n < count)
    assert homes_of(loads_of(shares), workers, {}) == homes_of(loads_of(shares), shuffled, {})


def test_light_adapters_live_at_the_first_of_their_order() -> None:
    workers = takers(8)
    homes = homes_of(loads_of([1.0] * 24), workers, {})
    first = sum(homes[n] == order_of(workers, n)[:1] for n in range(24))
    assert first > 16


def test_worker_takes_no_more_adapters_than_slots_while_others_have_some() -> None:
    homes = homes_of(loads_of([1.0] * 32), takers(8, slots=4), {})
    taken = [home for (home,) in homes.values()]
    assert {taken.count(address) for address, _ in takers(8)} == {4}


@given(SHARES, st.integers(2, 9), st.randoms(use_true_random=False))
def test_small_shifts_of_load_move_no_home(shares: list[float], count: int, random: Random) -> None:
    """Loads shift by a part of what a present home is kept beyond the bound."""
    workers = takers(count, slots=100)
    loads = loads_of(shares)
    before = homes_of(loads, workers, {})
    most = 0.08 / count / len(loads)
    moved = [
        AdapterLoad(load.adapter, max(0.0, load.share + random.uniform(-most, most)))
        for load in loads
    ]
    within: dict[tuple[str, ...], float] = {}
    for load in loads:
        within[before[load.adapter]] = within.get(before[load.adapter], 0.0) + load.share
    if max(within.values()) <= BOUND / count:
        after = homes_of(moved, workers, before)
        stayed = [a for a in after if after[a] == before[a]]
        assert len(stayed) >= 0.5 * len(loads)


def test_ranks_get_their_stretch_of_the_line() -> None:
    workers = takers(8)
    low = {order_of(workers, n, (0.0, 0.25))[0] for n in range(50)}
    high = {order_of(workers, n, (0.75, 1.0))[0] for n in range(50)}
    line = sorted(address for address, _ in workers)
    assert low == {*line[:2]}
    assert high == {*line[6:]}
    assert order_of(workers, 1, (0.0, 0.125))[:2] == (line[0], line[1]), "spills to the neighbour"
    assert order_of(workers, 1, (1.0, 1.0))[0] == line[-1], "a rank without load has a worker too"


def test_leaving_worker_moves_only_its_adapters() -> None:
    workers = takers(8)
    left = workers[3][0]
    rest = tuple(each for each in workers if each[0] != left)
    for adapter in range(100):
        former = order_of(workers, adapter)[0]
        if former != left:
            assert order_of(rest, adapter)[0] == former
