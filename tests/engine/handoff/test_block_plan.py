from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from searches import examples
from trtmesh.engine.handoff.block_plan import BlockCopies, copies, problem_between
from trtmesh.engine.handoff.lease import Problem
from trtmesh.engine.kv_memory import Shard

LAYERS, HEADS, DIM = 3, 4, 2
Bytes = NDArray[np.uint8]
WHOLE = Shard(range(LAYERS), range(HEADS), 16, DIM, 1, 4)


def split(count: int, *, by: str, tokens_per_block: int) -> list[Shard]:
    """Shards of all layers and heads, split into `count` by "heads" or "layers"."""
    whole = replace(WHOLE, tokens_per_block=tokens_per_block)
    size = (HEADS if by == "heads" else LAYERS) // count
    bounds = [range(number * size, (number + 1) * size) for number in range(count)]
    if by == "heads":
        return [replace(whole, kv_heads=each) for each in bounds]
    return [replace(whole, layers=each) for each in bounds]


def pool_of(shard: Shard, kv: NDArray[np.float32]) -> Bytes:
    """The blocks [blocks, bytes] of a shard with `kv` [tokens, layers, 2, heads, dim]."""
    size = shard.tokens_per_block
    blocks = -(-len(kv) // size)
    padded = np.full((blocks * size, *kv.shape[1:]), -1, dtype=np.float32)
    padded[: len(kv)] = kv
    own = padded[:, shard.layers.start : shard.layers.stop]
    own = own[:, :, :, shard.kv_heads.start : shard.kv_heads.stop]
    rows = own.reshape(blocks, size, *own.shape[1:]).transpose(0, 2, 3, 4, 1, 5)
    return np.ascontiguousarray(rows).reshape(blocks, -1).view(np.uint8)


def blocks_of(copy: BlockCopies) -> list[tuple[int, int]]:
    return list(zip(copy.source_blocks.tolist(), copy.target_blocks.tolist(), strict=True))


sizes = st.sampled_from([16, 32]) | st.integers(1, 40)
splits = st.sampled_from([(1, "heads"), (2, "heads"), (4, "heads"), (3, "layers")])


@settings(max_examples=examples(50, soak=200), deadline=None)
@given(sizes, sizes, splits, splits, st.integers(1, 100), st.data())
def test_copies_fill_any_receiver_from_any_sender(
    source_size: int,
    target_size: int,
    source_split: tuple[int, str],
    target_split: tuple[int, str],
    tokens: int,
    data: st.DataObject,
) -> None:
    first = data.draw(st.integers(0, tokens))
    cut = data.draw(st.integers(0, LAYERS))
    sources = split(source_split[0], by=source_split[1], tokens_per_block=source_size)
    targets = split(target_split[0], by=target_split[1], tokens_per_block=target_size)
    shape = (tokens, LAYERS, 2, HEADS, DIM)
    kv = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    before = np.full(shape, -2, dtype=np.float32)
    expected = np.concatenate([before[:first], kv[first:]])
    assert problem_between(sources, targets) is None
    for target in targets:
        pool = pool_of(target, before)
        for source in sources:
            full = pool_of(source, kv)
            for layers in (range(cut), range(cut, LAYERS)):
                for copy in copies(source, target, range(first, tokens), layers):
                    for run in copy.runs:
                        piece = full[copy.source_blocks, run.source : run.source + run.size]
                        pool[copy.target_blocks, run.target : run.target + run.size] = piece
        assert (pool == pool_of(target, expected)).all()


def test_equal_blocks_are_single_runs() -> None:
    (shard,) = split(1, by="heads", tokens_per_block=16)
    (both,) = copies(shard, shard, range(16, 48))
    assert blocks_of(both) == [(1, 1), (2, 2)]
    assert [run.size for run in both.runs] == [shard.block_bytes]


def test_small_blocks_fill_halves_of_large_ones() -> None:
    (small,) = split(1, by="heads", tokens_per_block=16)
    (large,) = split(1, by="heads", tokens_per_block=32)
    plan = copies(small, large, range(64))
    assert [blocks_of(each) for each in plan] == [[(0, 0), (2, 1)], [(1, 0), (3, 1)]]
    assert len(plan[0].runs) == 2 * LAYERS * HEADS


def test_half_of_the_heads_is_a_run_for_each_key_and_value() -> None:
    (whole,) = split(1, by="heads", tokens_per_block=16)
    half = split(2, by="heads", tokens_per_block=16)[1]
    (copy,) = copies(whole, half, range(16))
    assert len(copy.runs) == 2 * LAYERS
    assert sum(run.size for run in copy.runs) == half.block_bytes


@pytest.mark.parametrize(
    "other",
    [
        replace(WHOLE, data_type=2),
        replace(WHOLE, element_bytes=2),
        replace(WHOLE, head_dim=4),
        replace(WHOLE, kv_heads=range(1, HEADS + 1)),
        replace(WHOLE, layers=range(LAYERS + 1)),
    ],
)
def test_shards_of_another_kind_are_incompatible(other: Shard) -> None:
    assert problem_between([WHOLE], [other]) is Problem.INCOMPATIBLE
