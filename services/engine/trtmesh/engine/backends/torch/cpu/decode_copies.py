"""Contiguous copies of the keys and values of decoding sequences, kept from step to step.

Gathering blocks in every step reads and writes all keys and values of a sequence for one new token. Where the same
sequences decode again, each a token further, their blocks are gathered once, and later steps only add the new tokens.
A sequence that joins or leaves ends this until the batch has stayed the same for a step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from trtmesh.engine.backends.torch.memory.blocks import BlockTables
from trtmesh.engine.backends.torch.memory.kvcache import KvCache, Rows

ROOM_TOKENS = 64
"""Tokens by which sequences can grow before their copies are made anew."""

Partition = Callable[[Rows], list[tuple[int, int]]]


class DecodeCopies:
    """The copies of one cache, in at most `most_bytes` of memory."""

    def __init__(
        self, cache: KvCache, tables: BlockTables, dtype: torch.dtype, most_bytes: int
    ) -> None:
        """`dtype` is the type of queries, keys and values."""
        self._cache = cache
        self._tables = tables
        self._most_bytes = most_bytes
        device = cache.pool.device
        # One per layer, grown on demand.
        self._spaces = [
            torch.empty(0, dtype=dtype, device=device) for _ in range(cache.shape.layers)
        ]
        self._slots = self._versions = self._starts = np.zeros(0, dtype=np.int64)
        self._copies: list[DecodeCopy] = []

    def follow(self, slots: Rows, starts: Rows, partition: Partition) -> list[DecodeCopy]:
        """Copies for the sequences in `slots`, with tokens at `starts` in this step; none where the sequences changed
        or do not fit.

        Called in every step. `partition` cuts sequences of the given numbers of blocks into groups (first, last).
        """
        versions = self._tables.versions[slots]
        follows = (
            np.array_equal(slots, self._slots)
            and np.array_equal(versions, self._versions)
            and np.array_equal(starts, self._starts + 1)
        )
        self._slots, self._versions, self._starts = slots, versions, starts
        if not follows or not len(slots):
            self._copies = []
        elif not self._copies or any(copy.is_full for copy in self._copies):
            self._copies = self._make(partition)
        for copy in self._copies:
            copy.advance(starts[copy.first : copy.last])
        return self._copies

    def _make(self, partition: Partition) -> list[DecodeCopy]:
        shape, size = self._cache.shape, self._cache.tokens_per_block
        groups = partition(self._starts // size + 1)
        blocks = [-(-(int(self._starts[last - 1]) + 1 + ROOM_TOKENS) // size) for _, last in groups]
        elements = [
            2 * (last - first) * shape.kv_heads * count * size * shape.head_dim
            for (first, last), count in zip(groups, blocks, strict=True)
        ]
        needed = sum(elements)
        if needed * self._spaces[0].itemsize * shape.layers > self._most_bytes:
            return []
        if needed > self._spaces[0].numel():
            self._spaces = [space.new_empty(needed) for space in self._spaces]
        copies = []
        begin = 0
        for (first, last), count, own in zip(groups, blocks, elements, strict=True):
            table = np.zeros((last - first, count), dtype=np.int64)
            known = self._tables.rows[self._slots[first:last], :count]
            # The null block beyond the table: masked places need zeros.
            table[:, : known.shape[1]] = known
            spaces = [space[begin : begin + own] for space in self._spaces]
            copies.append(DecodeCopy(self._cache, first, last, table, spaces))
            begin += own
        return copies


class DecodeCopy:
    """Copies for the sequences [first, last) of a step."""

    def __init__(
        self, cache: KvCache, first: int, last: int, table: Rows, spaces: list[Tensor]
    ) -> None:
        """`table` [sequences, blocks] are their blocks with room to grow, `spaces` the memory of each layer."""
        self.first, self.last = first, last
        self._cache = cache
        heads, size = cache.shape.kv_heads, cache.shape.head_dim
        count, blocks = table.shape
        self._capacity: int = blocks * cache.tokens_per_block
        self._spaces = [space.view(2, count, heads, self._capacity, size) for space in spaces]
        self._filled = [False] * len(spaces)
        self._rows = torch.from_numpy(cache.rows_of_blocks(table).reshape(-1))
        # Row of the first token by sequence, key or value, and head, in the order of a step's keys and values.
        rows = np.arange(2 * count * heads, dtype=np.int64).reshape(2, count, heads)
        self._first_rows = rows.swapaxes(0, 1).reshape(count, -1) * self._capacity
        self.length = 0

    @property
    def is_full(self) -> bool:
        return self.length == self._capacity

    def advance(self, starts: Rows) -> None:
        """Sets the positions of this step's tokens, in ascending order."""
        self.length = int(starts[-1]) + 1
        self._new_rows = torch.from_numpy((self._first_rows + starts[:, None]).reshape(-1))

    def take(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, kv_heads, length, head_dim].

        `kv` [sequences, 2 * kv_heads, head_dim] are the new ones, which the cache already holds.
        """
        space = self._spaces[layer]
        if self._filled[layer]:
            size = self._cache.shape.head_dim
            space.view(-1, size).index_copy_(0, self._new_rows, kv.reshape(-1, size))
        else:
            gathered = self._cache.block_rows[layer].index_select(0, self._rows)
            space.view(gathered.shape).copy_(gathered)
            self._filled[layer] = True
        keys, values = space.narrow(3, 0, self.length).unbind(0)
        return keys, values
