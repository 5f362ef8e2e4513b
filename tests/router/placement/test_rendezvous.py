"""Rendezvous hashing depends only on the key and the set of workers."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from trtmesh.router.placement import POLICIES, PlacementQuery, WorkerSnapshot, place
from trtmesh.router.placement.rendezvous import highest

ADDRESSES = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
KEYS = st.integers(0, 2**64 - 1)
MANY = 12_000
"""Keys, equal in each run, so that shares do not depend on chance."""


@given(ADDRESSES, KEYS, st.randoms(use_true_random=False))
def test_order_of_workers_does_not_matter(addresses: list[str], key: int, random: Random) -> None:
    chosen = highest(addresses, key)
    assert chosen in addresses
    random.shuffle(addresses)
    assert highest(addresses, key) == chosen


@given(ADDRESSES, KEYS, st.data())
def test_leaving_worker_moves_only_the_own_keys(
    addresses: list[str], key: int, data: st.DataObject
) -> None:
    assume(len(addresses) > 1)
    chosen = highest(addresses, key)
    left = data.draw(st.sampled_from([each for each in addresses if each != chosen]))
    assert highest([each for each in addresses if each != left], key) == chosen


@given(ADDRESSES, KEYS, st.text(min_size=1))
def test_joining_worker_takes_a_key_or_changes_nothing(
    addresses: list[str], key: int, joining: str
) -> None:
    assume(joining not in addresses)
    assert highest([*addresses, joining], key) in {highest(addresses, key), joining}


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_keys_are_shared_equally_before_and_after_a_leave(count: int) -> None:
    addresses = [f"10.0.0.{number}:8001" for number in range(count)]
    homes = {key: highest(addresses, key) for key in range(MANY)}
    assert_even(Counter(homes.values()), addresses)
    left, *others = addresses
    orphans = [key for key, home in homes.items() if home == left]
    assert_even(Counter(highest(others, key) for key in orphans), others)


def assert_even(shares: Counter[str], addresses: list[str]) -> None:
    """Pearson's test: for equal probabilities the sum has mean `freedom` and variance 2 * freedom."""
    freedom = len(addresses) - 1
    mean = shares.total() / len(addresses)
    spread = sum((shares[each] - mean) ** 2 / mean for each in addresses)
    assert spread <= freedom + 4 * (2 * freedom) ** 0.5


def test_every_process_agrees() -> None:
    addresses = [f"worker-{number}:8001" for number in range(9)]
    code = (
        "from trtmesh.router.placement.rendezvous import highest\n"
        f"print([highest({addresses}, key) for key in range(50)])"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert told == {str([highest(addresses, key) for key in range(50)])}


LOADS = st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=1, max_size=10)
"""Waits of few values, to get ties."""


def fleet_of(loads: list[float]) -> list[WorkerSnapshot]:
    return [
        WorkerSnapshot(
            f"{number}:1", str(number), "m", "", frozenset(), last_turn=number,
            wait_seconds=load, prefill_seconds=0.001,
        )
        for number, load in enumerate(loads)
    ]  # fmt: skip


@given(LOADS, KEYS)
def test_unknown_prefix_goes_to_the_hashed_worker_among_the_best(
    loads: list[float], key: int
) -> None:
    fleet = fleet_of(loads)
    asked = PlacementQuery("m", prompt_tokens=100, prefix=key)
    best = [each.address for each in fleet if each.wait_seconds == min(loads)]
    chosen = place("prefix_aware", fleet, asked).chosen
    assert chosen.address == highest(best, key)
    assert place("prefix_aware", fleet[::-1], asked).chosen == chosen


@given(LOADS, KEYS, st.data())
def test_known_prefix_goes_to_the_holder(loads: list[float], key: int, data: st.DataObject) -> None:
    fleet = fleet_of([0.0] * len(loads))
    holder = data.draw(st.sampled_from(fleet))
    asked = PlacementQuery("m", prompt_tokens=100, prefix=key, cached_tokens={holder.address: 64})
    assert place("prefix_aware", fleet, asked).chosen == holder


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"prefix_aware"}))
@given(loads=LOADS, key=KEYS)
def test_no_other_policy_looks_at_the_key(policy: str, loads: list[float], key: int) -> None:
    fleet = fleet_of(loads)
    with_key, without = (
        place(policy, fleet, PlacementQuery("m", prompt_tokens=100, prefix=prefix)).chosen
        for prefix in (key, None)
    )
    assert with_key == without
