"""Groups the sequences of a step for attention, and provides their keys and values: gathered, or copied earlier.

In the flat batch, sequences with a single token (decode) come first, sorted by length, then the chunks. Decoding
sequences are cut into groups of similar lengths, small enough for the CPU's caches; a group costs a gather of rows and
an attention call. Every chunk is a separate group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache, Rows
from trtmesh.engine.backends.torch.model.attention import StepTokens

GROUP_BYTES = 4 * 2**20
"""Most bytes of gathered keys of a decode group; larger copies fall out of the caches."""
SMALL_GROUP_BYTES = 512 * 1024
"""Up to this size a further group costs more than padding."""
PADDING = 1.25
"""Most keys gathered per key needed, in larger groups."""
ROOM_TOKENS = 64
"""Sequences can grow by so many tokens before their copies are made anew."""

Partition = Callable[[Rows], list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many tokens in the step, attended to in a single call.

    `rows` [2 * sequences * kv_heads * blocks] are gathered into `gathered`, and converted into `widened` where the
    cache has another type; `keys` and `values` [sequences, kv_heads, keys, head_dim] are views of the result. `mask`
    broadcasts to [sequences, 1, tokens, keys] and is added. A group without rows has a `copy`, or is the beginning of a
    sequence and attends to the keys of the step; `causal` marks a mask against later tokens only.
    """

    first: int
    last: int
    tokens: int
    mask: Tensor | None
    causal: bool = False
    rows: Tensor | None = None
    gathered: Tensor | None = None
    widened: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    copy: DecodeCopy | None = None


class Grouping:
    """Makes groups, and owns their shared workspace."""

    def __init__(
        self, cache: KvCache, tables: Rows, dtype: torch.dtype, copies: DecodeCopies
    ) -> None:
        """`dtype` is the type of queries, keys and values."""
        self._copies = copies
        self._cache = cache
        self._tables = tables
        self._dtype = dtype
        self._device = cache.pool.device
        self._workspace = cache.pool.new_empty(0)
        self._wide = torch.empty(0, dtype=dtype, device=self._device)

    def groups(self, step: StepTokens, window: int | None) -> list[Group]:
        groups = self._copied_groups(step) if window is None else []
        if not groups:
            lengths = step.starts[: step.singles] + 1
            visible = lengths if window is None else np.minimum(lengths, window)
            size = self._cache.tokens_per_block
            # A window beginning inside a block touches an additional block.
            blocks = np.minimum(-(-lengths // size), -(-(visible + size - 1) // size))
            groups = [
                self._single_group(step, first, last, int(blocks[last - 1]), window)
                for first, last in self._partition(blocks)
            ]
        token = step.singles
        for sequence in range(step.singles, len(step.slots)):
            count = int(step.counts[sequence])
            groups.append(self._chunk_group(step, sequence, token, count, window))
            token += count
        self._provide(groups)
        return groups

    def _copied_groups(self, step: StepTokens) -> list[Group]:
        """Groups of the decoding sequences, where the last step had the same."""
        singles = slice(0, step.singles)
        copies = self._copies.follow(step.slots[singles], step.starts[singles], self._partition)
        groups = []
        for copy in copies:
            lengths = step.starts[copy.first : copy.last] + 1
            hidden = np.arange(copy.length) >= lengths[:, None]
            mask = self._mask(hidden[:, None, None, :]) if hidden.any() else None
            groups.append(Group(copy.first, copy.last, 1, mask, copy=copy))
        return groups

    def _partition(self, blocks: Rows) -> list[tuple[int, int]]:
        """Cuts sequences into groups (first, last); `blocks` to gather are ascending."""
        groups = []
        first = 0
        while first < len(blocks):
            last = self._group_end(blocks, first)
            groups.append((first, last))
            first = last
        return groups

    def _group_end(self, blocks: Rows, first: int) -> int:
        shape = self._cache.shape
        block_bytes = shape.kv_heads * self._cache.tokens_per_block * shape.head_dim
        block_bytes *= self._dtype.itemsize
        last = first + 1
        total = int(blocks[first])
        while last < len(blocks):
            longest = int(blocks[last])
            gathered = longest * (last + 1 - first)
            total += longest
            padded = gathered > PADDING * total and gathered * block_bytes > SMALL_GROUP_BYTES
            if padded or gathered * block_bytes > GROUP_BYTES:
                break
            last += 1
        return last

    def _single_group(
        self, step: StepTokens, first: int, last: int, blocks: int, window: int | None
    ) -> Group:
        slots = step.slots[first:last]
        lengths = step.starts[first:last] + 1
        size = self._cache.tokens_per_block
        if window is None:
            table = self._tables[slots, :blocks]
            hidden = np.arange(blocks * size) >= lengths[:, None]
        else:
            begins = np.maximum(lengths - window, 0) // size
            places = begins[:, None] + np.arange(blocks)
            table = self._tables[slots[:, None], np.minimum(places, self._tables.shape[1] - 1)]
            positions = begins[:, None] * size + np.arange(blocks * size)
            hidden = (positions >= lengths[:, None]) | (positions < lengths[:, None] - window)
        # [sequences, 1, 1, keys]
        mask = self._mask(hidden[:, None, None, :]) if hidden.any() else None
        return Group(first, last, 1, mask, rows=self._rows(table))

    def _chunk_group(
        self, step: StepTokens, sequence: int, token: int, count: int, window: int | None
    ) -> Group:
        start = int(step.starts[sequence])
        size = self._cache.tokens_per_block
        end = start + count
        first_key = 0 if window is None else max(0, start - window + 1) // size * size
        last_key = end if start == 0 else -(-end // size) * size
        positions = np.arange(start, end)[:, None]
        key_positions = np.arange(first_key if start else 0, last_key)
        hidden = key_positions > positions
        if window is not None:
            hidden |= key_positions <= positions - window
        # [1, 1, tokens, keys]
        mask = self._mask(hidden[None, None])
        if start == 0:
            causal = window is None or count <= window
            return Group(token, token + count, count, mask, causal=causal)
        slot = int(step.slots[sequence])
        table = self._tables[slot : slot + 1, first_key // size : last_key // size]
        return Group(token, token + count, count, mask, rows=self._rows(table))

    def _rows(self, table: Rows) -> Tensor:
        return torch.from_numpy(self._cache.rows_of_blocks(table).reshape(-1)).to(self._device)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return torch.from_numpy(mask).to(self._device, self._dtype)

    def _provide(self, groups: list[Group]) -> None:
        """Gives each group a view of the workspace; groups take turns there."""
        shape = self._cache.shape
        row_size = self._cache.tokens_per_block * shape.head_dim
        needed = max((len(group.rows) for group in groups if group.rows is not None), default=0)
        widens = self._workspace.dtype != self._dtype
        if needed * row_size > self._workspace.numel():
            # Room to grow: growing sequences must not allocate in every step.
            room = int(needed * row_size * 1.25)
            self._workspace = self._workspace.new_empty(room)
            self._wide = self._wide.new_empty(room) if widens else self._workspace
        for number, group in enumerate(groups):
            if group.rows is None:
                continue
            sequences = group.last - group.first if group.tokens == 1 else 1
            gathered, wide = (
                space[: len(group.rows) * row_size].view(-1, row_size)
                for space in (self._workspace, self._wide)
            )
            keys, values = wide.view(2, sequences, shape.kv_heads, -1, shape.head_dim)
            groups[number] = replace(
                group, gathered=gathered, widened=wide if widens else None, keys=keys, values=values
            )


class DecodeCopies:
    """Contiguous copies of the keys and values of decoding sequences, in at most `most_bytes` of memory.

    Gathering blocks reads and writes all keys and values of a sequence for a single new token. Where the same sequences
    decode again, the blocks are gathered once, and later steps only add the new tokens. A joining or leaving sequence
    ends this until the batch has stayed the same for a step.
    """

    def __init__(
        self, cache: KvCache, tables: BlockTables, dtype: torch.dtype, most_bytes: int
    ) -> None:
        """`dtype` is the type of queries, keys and values."""
        self._cache = cache
        self._tables = tables
        self._most_bytes = most_bytes
        device = cache.pool.device
        # A tensor per layer, grown on demand.
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

        `kv` [sequences, 2 * kv_heads, head_dim] are the new keys and values, already in the cache.
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
