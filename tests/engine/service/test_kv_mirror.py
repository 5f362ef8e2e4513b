"""The mirror of the KV cache's reusable contents."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksCleared, BlocksRemoved, BlocksStored
from trtmesh.engine.service.streams import KvMirror


def test_mirror_numbers_events_from_zero() -> None:
    mirror = KvMirror()
    assert mirror.record([BlocksCleared(), BlocksCleared()]) == 0
    assert mirror.record([BlocksCleared()]) == 2
    assert mirror.next_sequence == 3


def test_each_mirror_draws_its_own_epoch() -> None:
    assert KvMirror().epoch != KvMirror().epoch


def test_snapshot_merges_a_chain_of_one_adapter() -> None:
    mirror = KvMirror()
    mirror.record([BlocksStored(0, [1, 2], [10, 11, 12, 13])])
    mirror.record([BlocksStored(2, [3], [14, 15]), BlocksStored(1, [4], [16, 17], Adapter(9))])
    assert mirror.snapshot() == [
        BlocksStored(0, [1, 2, 3], [10, 11, 12, 13, 14, 15]),
        BlocksStored(1, [4], [16, 17], Adapter(9)),
    ]


@given(st.integers(), st.integers(0, 60))
def test_snapshot_lists_parents_before_children(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    mirror = KvMirror()
    parents: dict[int, int] = {}
    for _ in range(steps):
        block = draw.randint(1, 15)
        if block in parents:
            mirror.record([BlocksRemoved([block])])
            del parents[block]
        else:
            parents[block] = draw.choice([0, *(p for p in parents if p < block)])
            mirror.record([BlocksStored(parents[block], [block], [block, block])])
    told: dict[int, int] = {}
    for event in mirror.snapshot():
        assert isinstance(event, BlocksStored)
        parent = event.parent_hash
        for block in event.block_hashes:
            assert parent in told or parent not in parents
            told[block] = parent
            parent = block
    assert told == parents
    assert len(mirror._blocks) == len(parents)


def test_clearing_empties_the_snapshot() -> None:
    mirror = KvMirror()
    mirror.record([BlocksStored(0, [1], [5]), BlocksCleared()])
    assert mirror.snapshot() == []
