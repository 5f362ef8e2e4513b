"""The KV pool as one tensor, and the numbers by which attention finds rows in it.

Layout [blocks, layers, 2, kv_heads, tokens_per_block, head_dim], with 2 for key and value: one block is one run of
bytes, and so is a range of its heads. Seen as rows of [tokens_per_block * head_dim], the keys of (block, layer, head)
are row ((block * layers + layer) * 2 + 0) * kv_heads + head; the row of a layer is thus that of layer 0 plus a
constant, so one index serves all layers, each applied to a view that begins at its own constant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from trtmesh.engine.backends.torch.blocks import NULL_BLOCK, Move

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a token leaves in the cache; the value size may be below head_dim, which then is the key's."""

    layers: int
    kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


class KvCache:
    """The pool; block 0 is the null block, so it holds one block more than can be given out."""

    def __init__(
        self,
        shape: KvShape,
        *,
        blocks: int,
        tokens_per_block: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.tokens_per_block = tokens_per_block
        heads = shape.kv_heads
        self.pool = torch.zeros(
            (blocks + 1, shape.layers, 2, heads, tokens_per_block, shape.head_dim),
            dtype=dtype,
            device=device,
        )
        self._rows_per_block = shape.layers * 2 * heads
        block_rows = self.pool.view(-1, tokens_per_block * shape.head_dim)
        token_rows = self.pool.view(-1, shape.head_dim)
        firsts = [[(layer * 2 + kv) * heads for kv in (0, 1)] for layer in range(shape.layers)]
        # For each layer, of keys and of values: [rows, tokens_per_block * head_dim] and [rows, head_dim].
        self.block_rows = [[block_rows[first:] for first in pair] for pair in firsts]
        self._token_rows = [
            [token_rows[first * tokens_per_block :] for first in pair] for pair in firsts
        ]
        self._head_rows: Rows = np.arange(heads, dtype=np.int64)

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Does what the pool decided, as if one after another.

        Blocks that are given out become zero: what is masked is still multiplied, by zero, and must be finite.
        """
        device = self.pool.device
        for sources, targets in _batches(moves):
            target = torch.tensor(targets, device=device)
            if any(sources):
                content = self.pool.index_select(0, torch.tensor(sources, device=device))
                self.pool.index_copy_(0, target, content)
            else:
                self.pool.index_fill_(0, target, 0)

    def rows_of_blocks(self, blocks: Rows) -> Rows:
        """Block rows of layer 0's keys for `blocks` [sequences, blocks]: [sequences, kv_heads, blocks]."""
        return blocks[:, None, :] * self._rows_per_block + self._head_rows[None, :, None]

    def rows_of_tokens(self, blocks: Rows, positions: Rows) -> Rows:
        """Token rows of layer 0's keys for tokens at `positions` in `blocks`, [tokens] each: [tokens, kv_heads]."""
        size = self.tokens_per_block
        rows = blocks[:, None] * self._rows_per_block + self._head_rows[None, :]
        return rows * size + (positions % size)[:, None]

    def write(
        self, layer: int, token_rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores `key` and `value` [tokens, kv_heads, head_dim] at `token_rows` [tokens * kv_heads]."""
        keys, values = self._token_rows[layer]
        size = self.shape.head_dim
        keys.index_copy_(0, token_rows, key.reshape(-1, size))
        values.index_copy_(0, token_rows, value.reshape(-1, size))


def _batches(moves: Sequence[Move]) -> Iterator[tuple[list[int], list[int]]]:
    """Sources and targets of runs of moves that may be read whole and then written: none reads what another writes.

    A run is all of zeros or all of copies.
    """
    sources: list[int] = []
    targets: list[int] = []
    for move in moves:
        alike = not sources or (move.source == NULL_BLOCK) == (sources[0] == NULL_BLOCK)
        if not alike or move.source in targets or move.target in targets:
            yield sources, targets
            sources, targets = [], []
        sources.append(move.source)
        targets.append(move.target)
    if targets:
        yield sources, targets
