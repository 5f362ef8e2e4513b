"""Moves of blocks, as the cache carries them out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import examples
from torch import Tensor
from trtmesh.engine.backends.torch.memory.kvcache import KvCache, KvShape, copy_blocks
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, Move


def copy_in_any_order(
    source: Tensor, target: Tensor, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Implements CopiesBlocks; the copies must not depend on each other."""
    assert len(set(targets)) == len(targets)
    assert source is not target or not {*sources} & {*targets}
    copy_blocks(source, target, sources, targets)


@given(st.integers(0, 2**32))
@settings(max_examples=examples(50, soak=100), deadline=None)
def test_moves_in_runs_are_moves_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    blocks, host = 5, 3
    cache = KvCache(
        KvShape(1, 1, 2),
        blocks=blocks,
        host_blocks=host,
        tokens_per_block=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        copies_blocks=copy_in_any_order,
    )
    content = [float(number) for number in range(blocks + 1 + host)]
    for number in range(1, blocks + 1 + host):
        place = cache.pool[number] if number <= blocks else cache.host[number - blocks - 1]
        place.fill_(number)
    moves = []
    for _ in range(draw.randint(1, 12)):
        source, target = draw.randrange(1 + blocks + host), draw.randrange(1, 1 + blocks + host)
        both_away = target > blocks and (source > blocks or source == NULL_BLOCK)
        if source != target and not both_away:
            moves.append(Move(source, target))
            content[target] = content[source]
    cache.carry_out(moves)
    rows = [*cache.pool.unbind(), *cache.host.unbind()]
    assert [float(row.flatten()[0]) for row in rows] == content
    assert all(bool((row == row.flatten()[0]).all()) for row in rows)
