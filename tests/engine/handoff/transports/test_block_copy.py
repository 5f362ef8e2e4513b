from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine.handoff.transports.kv_peer import copied, known_bytes, random_copy
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.engine.handoff.block_plan import Run, copies
from trtmesh.engine.handoff.transports import block_copy
from trtmesh.engine.handoff.transports.block_copy import batches
from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy
from trtmesh.engine.kv_memory import Bytes, Shard

BLOCKS = 7


def zeros(block_bytes: int) -> Bytes:
    return np.zeros((BLOCKS, block_bytes), dtype=np.uint8)


def check(*wanted: ShardCopy, sources: list[Bytes], targets: list[Bytes]) -> None:
    expected = [each.copy() for each in targets]
    copied(wanted, sources, expected)
    for batch in batches(wanted, sources, targets):
        for piece in batch:
            piece.copy()
    for found, right in zip(targets, expected, strict=True):
        assert (found == right).all()


@given(st.integers(0, 2**32), st.integers(40, 200), st.integers(40, 200))
def test_random_runs_are_copied(seed: int, source_bytes: int, target_bytes: int) -> None:
    copy = random_copy(seed, BLOCKS, source_bytes, target_bytes)
    source = known_bytes(seed, BLOCKS, source_bytes)
    check(copy, sources=[source], targets=[zeros(target_bytes)])


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([4, 16, 32]),
    st.sampled_from([4, 16, 32]),
    st.integers(1, 90),
)
def test_plans_between_shapes_are_copied(
    source_splits: int, target_splits: int, source_size: int, target_size: int, tokens: int
) -> None:
    def shards(splits: int, size: int) -> list[Shard]:
        heads = 8 // splits
        ranges = [range(number * heads, (number + 1) * heads) for number in range(splits)]
        return [Shard(range(3), each, size, 4, 1, 2) for each in ranges]

    wanted = [
        ShardCopy(one, other, each.source_blocks.tolist(), each.target_blocks.tolist(), each.runs)
        for one, source in enumerate(shards(source_splits, source_size))
        for other, target in enumerate(shards(target_splits, target_size))
        for each in copies(source, target, range(tokens))
    ]
    check(
        *wanted,
        sources=[
            np.random.default_rng(number).integers(0, 256, (90, each.block_bytes), dtype=np.uint8)
            for number, each in enumerate(shards(source_splits, source_size))
        ],
        targets=[
            np.zeros((90, each.block_bytes), dtype=np.uint8)
            for each in shards(target_splits, target_size)
        ],
    )


def test_batches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_copy, "BATCH_BYTES", 100)
    copy = ShardCopy(0, 0, [1, 2, 3, 5, 6], [1, 2, 3, 6, 5], (Run(0, 0, 60),))
    source = known_bytes(1, BLOCKS, 60)
    sizes = [sum(piece.size for piece in batch) for batch in batches([copy], [source], [zeros(60)])]
    assert sizes == [120, 120, 60]
    check(copy, sources=[source], targets=[zeros(60)])


@pytest.mark.parametrize(
    "change",
    [
        {"source_shard": 1},
        {"target_shard": -1},
        {"source_blocks": [0, BLOCKS]},
        {"source_blocks": [0, -1]},
        {"target_blocks": [0, BLOCKS]},
        {"runs": (Run(1, 0, 60),)},
        {"runs": (Run(0, 1, 60),)},
        {"runs": (Run(-1, 0, 8),)},
        {"runs": (Run(0, 0, 0),)},
    ],
)
def test_copies_outside_of_the_pools_are_refused(change: dict[str, Any]) -> None:
    copy = replace(ShardCopy(0, 0, [0, 1], [0, 1], (Run(0, 0, 60),)), **change)
    target = zeros(60)
    with pytest.raises(ReadFailed):
        list(batches([copy], [known_bytes(1, BLOCKS, 60)], [target]))
