"""KV of a simulated worker: real bytes that identify token, tokens before it, layer and head.

Bytes are written only for leases, and overwritten when their block is allocated anew. So a sequence that adopts KV of
other tokens, of an earlier use of a block, or incomplete KV, is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from trtmesh.engine.backends.simulated.settings import SimulatedKvCacheSettings
from trtmesh.engine.kv_memory import HostKvMemory, Shard, host_memory
from trtmesh.engine.scheduling.blocks import Move
from trtmesh.v1 import generation_pb2 as pb

LAYERS = 4
KV_HEADS = 2
ROWS = LAYERS * 2 * KV_HEADS
"""Keys and values of a token."""

FREED = 0xFD
"""Every byte of a block that was allocated anew."""

States = NDArray[np.uint64]
"""A state for each token, of it and all tokens before it."""
Words = NDArray[np.uint32]

_BLOCKS_AT_ONCE = 64
"""Bounds the memory of a check."""


class KvContent:
    """The pools, and what is in their blocks."""

    def __init__(self, settings: SimulatedKvCacheSettings) -> None:
        self.tokens_per_block = settings.tokens_per_block
        self._words = settings.token_bytes // (ROWS * 4)
        heads = KV_HEADS // settings.shards
        shards = [self._shard(range(at, at + heads)) for at in range(0, KV_HEADS, heads)]
        blocks = settings.total_blocks + 1
        pools = [host_memory(blocks, each.block_bytes) for each in shards]
        self.memory = HostKvMemory(shards, pools)
        self._pools = [self._view(index, shard) for index, shard in enumerate(shards)]
        self._written: dict[int, int | None] = {}
        """Blocks with content, with their name where they are full."""

    def _shard(self, heads: range) -> Shard:
        return Shard(
            layers=range(LAYERS),
            kv_heads=heads,
            tokens_per_block=self.tokens_per_block,
            head_dim=self._words,
            data_type=pb.DATA_TYPE_FP32,
            element_bytes=4,
        )

    def _view(self, index: int, shard: Shard) -> tuple[slice, Words]:
        """The shard's heads, and its words: [blocks, layers, 2, heads, tokens, words]."""
        rows = self.memory.memory(index).rows
        shape = (len(rows), LAYERS, 2, len(shard.kv_heads), self.tokens_per_block, self._words)
        return slice(shard.kv_heads[0], shard.kv_heads[-1] + 1), rows.view(np.uint32).reshape(shape)

    def is_written(self, block: int, name: int) -> bool:
        """Whether a shared block has its content."""
        return self._written.get(block) == name

    def write(self, blocks: Sequence[int], states: States, layers: range) -> None:
        """Writes the KV of tokens; `states` are by block."""
        for at, some in _chunks(blocks):
            for layer in layers:
                words = self._expected(states[at : at + len(some)], layer)
                for heads, pool in self._pools:
                    pool[some, layer] = words[:, :, heads]
        self.expect(blocks)

    def expect(self, blocks: Sequence[int]) -> None:
        """Records blocks that get content, here or from a peer."""
        for block in blocks:
            self._written.setdefault(block, None)

    def name(self, blocks: Sequence[int], names: Sequence[int]) -> None:
        """Records the names of full blocks with content."""
        self._written.update(zip(blocks, names, strict=False))

    def damaged(self, blocks: Sequence[int], states: States) -> int | None:
        """The position of the first block with other KV than that of its tokens."""
        valid = np.arange(len(blocks) * self.tokens_per_block) < len(states)
        valid = valid.reshape(len(blocks), self.tokens_per_block)
        states = self.by_block(states, len(blocks))
        for at, some in _chunks(blocks):
            wrong = np.zeros(len(some), dtype=np.bool_)
            for layer in range(LAYERS):
                words = self._expected(states[at : at + len(some)], layer)
                for heads, pool in self._pools:
                    differs = (pool[some, layer] != words[:, :, heads]).any(axis=(1, 2, 4))
                    wrong |= (differs & valid[at : at + len(some)]).any(axis=1)
            if wrong.any():
                return at + int(wrong.argmax())
        return None

    def by_block(self, states: States, blocks: int) -> States:
        """The states of tokens, [blocks, tokens], and 0 after the last token."""
        padded = np.zeros(blocks * self.tokens_per_block, dtype=np.uint64)
        padded[: len(states)] = states[: len(padded)]
        return padded.reshape(blocks, self.tokens_per_block)

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Overwrites the content of blocks that are allocated anew. One that begins as a copy is written where it is
        handed over."""
        written = list(self._written.keys() & {move.target for move in moves})
        for block in written:
            del self._written[block]
        if written:
            for _, pool in self._pools:
                pool.view(np.uint8)[written] = FREED

    def _expected(self, states: States, layer: int) -> Words:
        """KV of a layer: [blocks, 2, heads, tokens, words]."""
        rows = np.arange(2 * KV_HEADS, dtype=np.uint64).reshape(1, 2, KV_HEADS, 1) + np.uint64(
            layer * 2 * KV_HEADS + 1
        )
        first = _mix(states[:, None, None, :] + rows * _STEP).astype(np.uint32)
        return np.add.outer(first, np.arange(self._words, dtype=np.uint32))


def states_of(root_hash: int, token_ids: Sequence[int]) -> States:
    """The states of a sequence's tokens. Unlike names, they do not depend on the size of blocks."""
    positions = np.arange(len(token_ids), dtype=np.uint64) << np.uint64(32)
    tokens = _mix(positions | np.asarray(token_ids, dtype=np.uint64))
    return _mix(np.cumsum(tokens, dtype=np.uint64) + np.uint64(root_hash))


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _chunks(blocks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    for at in range(0, len(blocks), _BLOCKS_AT_ONCE):
        yield at, blocks[at : at + _BLOCKS_AT_ONCE]


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
