"""Groups the sequences of a step for attention, and provides the workspace for their keys and values.

In the flat batch, sequences with one token (decode) come first, sorted by length, then the chunks. Decoding sequences
are cut into groups of similar lengths, small enough for the CPU's caches; a group costs one gather of rows and one
attention call. Every chunk is a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.engine.backends.torch.cpu.decode_copies import DecodeCopies, DecodeCopy
from trtmesh.engine.backends.torch.memory.kvcache import KvCache, Rows
from trtmesh.engine.backends.torch.model.attention import StepTokens

GROUP_BYTES = 4 * 2**20
"""Most bytes of gathered keys of a decode group; larger copies fall out of the caches."""
SMALL_GROUP_BYTES = 512 * 1024
"""Up to this size a further group costs more than padding."""
PADDING = 1.25
"""Most keys gathered per key needed, in larger groups."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many tokens in the step, attended to in one call.

    `rows` [2 * sequences * kv_heads * blocks] are gathered into `gathered`, and converted into `widened` where the
    cache has another type; `keys` and `values` [sequences, kv_heads, keys, head_dim] are views of the result. `mask`
    broadcasts to [sequences, 1, tokens, keys] and is added. A group without rows has a `copy`, or is the beginning of a
    sequence and attends to the keys of the step; `causal` marks a mask that hides only later tokens.
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
        """The groups of a step for layers with this sliding window."""
        groups = self._copied_groups(step) if window is None else []
        if not groups:
            lengths = step.starts[: step.singles] + 1
            visible = lengths if window is None else np.minimum(lengths, window)
            size = self._cache.tokens_per_block
            # A window that begins inside a block touches an additional block.
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
        """The end of the group that begins at `first`."""
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
        """Gives each group a view of the workspace; groups use it one after another."""
        shape = self._cache.shape
        row_size = self._cache.tokens_per_block * shape.head_dim
        needed = max((len(group.rows) for group in groups if group.rows is not None), default=0)
        widens = self._workspace.dtype != self._dtype
        if needed * row_size > self._workspace.numel():
            # Room to grow, so that growing sequences do not allocate in every step.
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
                group,
                gathered=gathered,
                widened=wide if widens else None,
                keys=keys,
                values=values,
            )
