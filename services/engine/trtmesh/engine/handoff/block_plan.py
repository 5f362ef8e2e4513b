"""Which bytes of the sender's blocks belong where in the receiver's, for different block sizes and head splits.

A pool has blocks of [layers, 2, kv_heads, tokens_per_block, head_dim], each contiguous. Shards split a worker's KV by
heads or layers; each shard is a pool, and a block has the same number in all. Offsets are bytes within a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from trtmesh.engine.handoff.lease import Problem


@dataclass(frozen=True, slots=True)
class Shard:
    """The blocks of a pool, and the layers and heads in it."""

    layers: range
    kv_heads: range
    tokens_per_block: int
    head_dim: int
    data_type: int
    element_bytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key or value in one head."""
        return self.head_dim * self.element_bytes

    @property
    def block_bytes(self) -> int:
        rows = 2 * len(self.layers) * len(self.kv_heads)
        return rows * self.tokens_per_block * self.token_bytes

    def offset(self, layer: int, value: int, head: int, token: int) -> int:
        """Offset of a token in its block; `value` is 0 for the key and 1 for the value."""
        row = (self.layers.index(layer) * 2 + value) * len(self.kv_heads)
        row += self.kv_heads.index(head)
        return (row * self.tokens_per_block + token) * self.token_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are contiguous on both sides."""

    source: int
    target: int
    size: int


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Runs between two blocks, given by their positions in the sequence. Equally aligned copies share `runs`."""

    source_block: int
    target_block: int
    runs: tuple[Run, ...]


def problem_between(sources: Sequence[Shard], targets: Sequence[Shard]) -> Problem | None:
    """Why the sources cannot fill the targets, if so."""
    kinds = {(each.data_type, each.element_bytes, each.head_dim) for each in (*sources, *targets)}
    lacking = _rows(targets) - _rows(sources)
    return Problem.INCOMPATIBLE if len(kinds) != 1 or lacking else None


def copies(
    source: Shard, target: Shard, tokens: range, layers: range | None = None
) -> Iterator[BlockCopy]:
    """The copies that bring `tokens` of the heads, and `layers` or all, that both shards have."""
    both = _common(source.layers, target.layers)
    both = both if layers is None else _common(both, layers)
    at = tokens.start
    while at < tokens.stop:
        source_block, source_token = divmod(at, source.tokens_per_block)
        target_block, target_token = divmod(at, target.tokens_per_block)
        count = min(
            tokens.stop - at,
            source.tokens_per_block - source_token,
            target.tokens_per_block - target_token,
        )
        runs = _runs(source, target, both, source_token, target_token, count)
        if runs:
            yield BlockCopy(source_block, target_block, runs)
        at += count


@cache
def _runs(
    source: Shard, target: Shard, layers: range, source_token: int, target_token: int, count: int
) -> tuple[Run, ...]:
    """The runs of `count` tokens between two blocks, adjacent ones joined."""
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
