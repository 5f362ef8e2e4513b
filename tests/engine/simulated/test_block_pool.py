"""The KV blocks of a simulated worker."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.engine.backends.simulated.block_pool import BlockPool


def test_private_blocks_come_back() -> None:
    freed: list[int] = []
    pool = BlockPool(4, freed.extend)
    assert pool.can_acquire([], 4)
    assert pool.acquire([], 4) == ([1, 2, 3, 4], [])
    assert not pool.can_acquire([], 1)
    pool.release([], [1, 2, 3, 4])
    assert pool.free_blocks == 4
    assert freed == [1, 2, 3, 4]


def test_shared_blocks_are_kept_until_the_room_is_needed() -> None:
    freed: list[int] = []
    pool = BlockPool(4, freed.extend)
    pool.acquire([], 3)
    assert pool.share([11, 12], [1, 2]) == [True, True]
    pool.release([11, 12], [3])
    assert (pool.used_blocks, pool.match([11, 12, 13])) == (0, 2)
    assert pool.numbers([11, 12]) == [1, 2]
    assert pool.acquire([], 3) == ([3, 2, 4], [12]), "the child goes before its parent"
    assert pool.match([11, 12]) == 1
    assert freed == [3, 2]


def test_what_a_sequence_holds_is_not_evicted() -> None:
    pool = _pool(3)
    pool.acquire([], 1)
    pool.share([11], [1])
    pool.release([11], [])
    assert pool.acquire([11], 2) == ([2, 3], [])
    assert not pool.can_acquire([], 1)


def test_an_equal_block_is_held_once() -> None:
    pool = _pool(4)
    pool.acquire([], 2)
    assert pool.share([11], [1]) == [True]
    assert pool.share([11], [2]) == [False]
    assert pool.used_blocks == 1
    pool.release([11], [])
    assert pool.used_blocks == 1
    pool.release([11], [])
    assert pool.used_blocks == 0


def test_publishing_leaves_an_equal_block_where_it_is() -> None:
    pool = _pool(4)
    pool.acquire([], 3)
    assert pool.publish([11], [1]) == [True]
    assert pool.publish([11, 12], [2, 3]) == [False, True]
    assert pool.used_blocks == 3
    pool.release([11, 12], [2])
    assert pool.used_blocks == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=60), st.randoms())
def test_no_block_has_two_owners_in_any_order(
    requests: list[tuple[int, int]], order: random.Random
) -> None:
    pool = _pool(12)
    held: list[tuple[list[int], list[int]]] = []
    known: set[int] = set()
    for family, length in requests:
        names = [family * 100 + number for number in range(length)]
        shared = names[: pool.match(names)]
        assert known.issuperset(shared)
        private = length + 1 - len(shared)
        if pool.can_acquire(shared, private):
            numbers, evicted = pool.acquire(shared, private)
            assert known.issuperset(evicted)
            known.difference_update(evicted)
            fresh = names[len(shared) :]
            new = pool.share(fresh, numbers[: len(fresh)])
            known.update(h for h, is_new in zip(fresh, new, strict=True) if is_new)
            held.append((names, numbers[len(fresh) :]))
        elif held:
            pool.release(*held.pop(order.randrange(len(held))))
        owned = [number for _, numbers in held for number in numbers] + pool.numbers(sorted(known))
        assert len(owned) == len(set(owned))
        assert set(owned) <= set(range(1, 13))
        assert 0 <= pool.free_blocks <= 12
    for holding in held:
        pool.release(*holding)
    assert pool.used_blocks == 0


def _pool(total_blocks: int) -> BlockPool:
    freed: list[int] = []
    return BlockPool(total_blocks, freed.extend)
