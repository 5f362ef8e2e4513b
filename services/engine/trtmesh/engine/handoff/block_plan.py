"""Plans where the bytes of the sender's blocks belong in the receiver's, for different block sizes and head splits.

A pool has blocks of [layers, 2, kv_heads, tokens_per_block, head_dim], each contiguous. Shards split a worker's KV by
heads or layers; each shard is a pool, and a block has the same number in all. Offsets are bytes within a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from trtmesh.engine.handoff.lease import Problem
from trtmesh.engine.kv_memory import Shard

Positions: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes, contiguous on both sides."""

    source: int
    target: int
    size: int


class BlockCopies(NamedTuple):
    """Equally aligned copies: the runs between source_blocks[i] and target_blocks[i], positions in the sequence."""

    source_blocks: Positions
    target_blocks: Positions
    runs: tuple[Run, ...]


def problem_between(sources: Sequence[Shard], targets: Sequence[Shard]) -> Problem | None:
    """Why the sources cannot fill the targets, if so."""
    fits = all(_fit(one, other) for one in sources for other in targets)
    return None if fits and not _rows(targets) - _rows(sources) else Problem.INCOMPATIBLE


def _fit(source: Shard, target: Shard) -> bool:
    same_heads = source.head_dim == target.head_dim
    same_types = source.data_type == target.data_type
    return same_heads and same_types and source.element_bytes == target.element_bytes


def copies(
    source: Shard, target: Shard, tokens: range, layers: range | None = None
) -> list[BlockCopies]:
    """The copies of `tokens`, for the heads, and `layers` or all layers, of both shards.

    In arrays, since a long prompt has thousands of blocks and the event loop waits.
    """
    both = _common(source.layers, target.layers)
    both = both if layers is None else _common(both, layers)
    starts = _starts(tokens, source.tokens_per_block, target.tokens_per_block)
    source_blocks, source_tokens = np.divmod(starts, source.tokens_per_block)
    target_blocks, target_tokens = np.divmod(starts, target.tokens_per_block)
    counts = np.diff(starts, append=tokens.stop)
    alignments = (source_tokens * target.tokens_per_block + target_tokens) * len(tokens) + counts
    found = []
    for first, kind in zip(*np.unique(alignments, return_index=True)[::-1], strict=True):
        shape = int(source_tokens[first]), int(target_tokens[first]), int(counts[first])
        if runs := _runs(source, target, both, *shape):
            alike = alignments == kind
            found.append(BlockCopies(source_blocks[alike], target_blocks[alike], runs))
    return found


def _starts(tokens: range, *sizes: int) -> Positions:
    """The first token of each piece of `tokens` between the bounds of blocks of all sizes."""
    bounds = [np.arange((tokens.start // size + 1) * size, tokens.stop, size) for size in sizes]
    return np.unique(np.concatenate([np.array([*tokens[:1]], dtype=np.int64), *bounds]))


@cache
def _runs(
    source: Shard, target: Shard, layers: range, source_token: int, target_token: int, count: int
) -> tuple[Run, ...]:
    """The runs of `count` tokens between two blocks, joined where adjacent."""
    runs: list[Run] = []
    size = count * source.token_bytes
    for layer in layers:
        for value in (0, 1):
            for head in _common(source.kv_heads, target.kv_heads):
                _join(
                    runs,
                    Run(
                        source.offset(layer, value, head, source_token),
                        target.offset(layer, value, head, target_token),
                        size,
                    ),
                )
    return tuple(runs)


def _join(runs: list[Run], run: Run) -> None:
    last = runs[-1] if runs else Run(-1, -1, 0)
    if (last.source + last.size, last.target + last.size) == (run.source, run.target):
        runs[-1] = Run(last.source, last.target, last.size + run.size)
    else:
        runs.append(run)


def _common(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _rows(shards: Sequence[Shard]) -> set[tuple[int, int]]:
    return {(layer, head) for each in shards for layer in each.layers for head in each.kv_heads}
