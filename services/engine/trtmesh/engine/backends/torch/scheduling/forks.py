"""Sequences continuing from the KV of others, such as beams."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from trtmesh.engine.backends.torch.memory.block_tables import BlockTables
from trtmesh.engine.backends.torch.memory.blocks import BlockPool
from trtmesh.engine.backends.torch.scheduling.sequence import Sequence

Pairs = SequenceOf[tuple[Sequence, Sequence]]


@dataclass(frozen=True, slots=True)
class _State:
    """The state of a sequence before the exchange."""

    blocks: list[int]
    num_computed: int
    num_dropped: int
    num_published: int
    hashes: list[int]

    @classmethod
    def of(cls, sequence: Sequence) -> _State:
        return cls(
            sequence.blocks,
            sequence.num_computed,
            sequence.num_dropped,
            sequence.num_published,
            sequence.hashes,
        )


def reassign(pairs: Pairs, pool: BlockPool, tables: BlockTables, tokens_per_block: int) -> int:
    """Scheduler.reassign for the blocks; returns the number of copies.

    Full blocks are shared. One child of each parent, the heir, takes over the partial block; the other children get
    copies. As many sequences have a partial block afterwards as before, so the pool has enough blocks.
    """
    heirs = {parent.key: child.key for child, parent in reversed(pairs)}
    heirs |= {child.key: child.key for child, parent in pairs if child is parent}
    parents = {parent.key: _State.of(parent) for _, parent in pairs}
    for _, parent in pairs:
        pool.hold(parent.blocks[: parent.num_computed // tokens_per_block])
    for child, _ in pairs:
        full = child.num_computed // tokens_per_block
        pool.release(child.blocks[:full] if child.key in heirs else child.blocks)
    copied = 0
    for child, parent in pairs:
        state = parents[parent.key]
        full = state.num_computed // tokens_per_block
        rest = state.blocks[full:]
        if heirs[parent.key] != child.key:
            rest = [pool.copy(block) for block in rest]
            child.times.new_blocks += len(rest)
            copied += len(rest)
        child.blocks = state.blocks[:full] + rest
        child.num_computed = state.num_computed
        child.num_dropped = state.num_dropped
        child.num_published = state.num_published
        child.hashes = state.hashes[: state.num_published]
        tables.replace(child.slot, child.blocks)
    return copied
