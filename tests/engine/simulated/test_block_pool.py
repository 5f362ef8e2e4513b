"""The KV blocks of a simulated worker."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.engine.backends.simulated.block_pool import BlockPool


def test_private_blocks_come_back() -> None:
    pool = BlockPool(4)
    assert pool.can_acquire([], 4)
    assert pool.acquire([], 4) == []
    assert not pool.can_acquire([], 1)
    pool.release([], 4)
    assert pool.free_blocks == 4


def test_shared_blocks_are_kept_until_the_room_is_needed() -> None:
    pool = BlockPool(4)
    pool.acquire([], 3)
    assert pool.share([1, 2]) == [True, True]
    pool.release([1, 2], 1)
    assert (pool.used_blocks, pool.match([1, 2, 3])) == (0, 2)
    assert pool.acquire([], 3) == [2], "the child goes before its parent"
    assert pool.match([1, 2]) == 1


def test_what_a_sequence_holds_is_not_evicted() -> None:
    pool = BlockPool(3)
    pool.acquire([], 1)
    pool.share([1])
    pool.release([1], 0)
    assert pool.acquire([1], 2) == []
    assert not pool.can_acquire([], 1)


def test_an_equal_block_is_held_once() -> None:
    pool = BlockPool(4)
    pool.acquire([], 2)
    assert pool.share([1]) == [True]
    assert pool.share([1]) == [False]
    assert pool.used_blocks == 1
    pool.release([1], 0)
    assert pool.used_blocks == 1
    pool.release([1], 0)
    assert pool.used_blocks == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=60), st.randoms())
def test_counts_hold_in_any_order(requests: list[tuple[int, int]], order: random.Random) -> None:
    pool = BlockPool(12)
    held: list[tuple[list[int], int]] = []
    known: set[int] = set()
    for family, length in requests:
        hashes = [family * 100 + number for number in range(length)]
        shared = hashes[: pool.match(hashes)]
        assert known.issuperset(shared)
        private = length + 1 - len(shared)
        if pool.can_acquire(shared, private):
            evicted = pool.acquire(shared, private)
            assert known.issuperset(evicted)
            known.difference_update(evicted)
            fresh = hashes[len(shared) :]
            new = pool.share(fresh)
            known.update(h for h, is_new in zip(fresh, new, strict=True) if is_new)
            held.append((hashes, 1))
        elif held:
            pool.release(*held.pop(order.randrange(len(held))))
        assert 0 <= pool.free_blocks <= 12
        assert len(known) <= 12
    for holding in held:
        pool.release(*holding)
    assert pool.used_blocks == 0
