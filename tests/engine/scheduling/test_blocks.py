"""The block pool's book-keeping."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.block_hashes import ROOT_HASH
from trtmesh.engine.backend import BlocksRemoved, BlocksStored
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, BlockPool, Prefix


def published(pool: BlockPool, hashes: list[int]) -> list[int]:
    """A released chain of blocks under `hashes`."""
    blocks = pool.allocate(len(hashes))
    for block, name, parent in zip(blocks, hashes, [ROOT_HASH, *hashes], strict=False):
        pool.publish(block, name, parent, [name])
    pool.release(blocks)
    return blocks


def match(pool: BlockPool, hashes: Iterable[int]) -> list[int]:
    """The blocks of the leading published `hashes`."""
    blocks = (pool.published.find(block_hash) for block_hash in hashes)
    return [block for block in takewhile(lambda block: block is not None, blocks) if block]


def test_the_null_block_is_never_given_out() -> None:
    pool = BlockPool(5)
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
    assert NULL_BLOCK not in range(1, 6)
    assert not pool.can_allocate(1)


def test_a_published_block_is_found_until_it_is_needed_for_something_else() -> None:
    pool = BlockPool(3)
    blocks = published(pool, [10, 11])
    assert match(pool, [10, 11, 12]) == blocks
    assert pool.free_blocks == 3
    pool.allocate(2)
    # The child went first.
    assert match(pool, [10, 11]) == blocks[:1]
    pool.allocate(1)
    assert match(pool, [10]) == []


def test_a_held_block_is_shared_and_not_evicted() -> None:
    pool = BlockPool(3)
    blocks = published(pool, [10, 11])
    assert pool.can_allocate(1, beside=Prefix(blocks, 2))
    assert not pool.can_allocate(2, beside=Prefix(blocks, 2))
    pool.hold(blocks)
    pool.hold(blocks)
    assert pool.used_blocks == 2
    pool.release(blocks)
    assert pool.used_blocks == 2
    pool.release(blocks)
    assert pool.used_blocks == 0


def test_retracted_blocks_are_not_found() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.publish(block, 10, ROOT_HASH, [1])
    pool.retract([block])
    pool.release([block])
    assert match(pool, [10]) == []
    assert pool.free_blocks == 2


def test_a_hash_that_is_there_already_keeps_its_block() -> None:
    pool = BlockPool(2)
    (first,) = published(pool, [10])
    second = next(block for block in (1, 2) if block != first)
    assert pool.allocate(1) == [second]
    pool.publish(second, 10, ROOT_HASH, [10])
    assert match(pool, [10]) == [first]
    pool.release([second])
    assert pool.free_blocks == 2


def test_events_tell_chains_and_evictions_in_order() -> None:
    pool = BlockPool(2)
    published(pool, [10, 11])
    assert pool.take_events() == [BlocksStored(ROOT_HASH, [10, 11], [10, 11])]
    pool.allocate(2)
    assert pool.take_events() == [BlocksRemoved([11, 10])]
    assert pool.take_events() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=200))
def test_no_sequence_of_operations_loses_a_block(operations: list[tuple[int, int]]) -> None:
    pool = BlockPool(12)
    held: list[list[int]] = []
    hashes = 0
    for kind, number in operations:
        if kind == 0 and pool.can_allocate(number):
            held.append(pool.allocate(number))
        elif kind == 1 and held:
            pool.release(held.pop(number % len(held)))
        elif kind == 2 and held:
            for block in held[number % len(held)]:
                hashes += 1
                pool.publish(block, hashes, hashes - 1, [hashes])
        elif kind == 3:
            found = match(pool, range(max(1, hashes - number), hashes + 1))
            pool.hold(found)
            held.append(found)
        distinct = {block for blocks in held for block in blocks}
        assert pool.used_blocks == len(distinct)
        assert pool.free_blocks + pool.used_blocks == 12
