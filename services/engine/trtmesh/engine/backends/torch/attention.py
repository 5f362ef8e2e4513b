"""Attention of a flat batch over the paged cache, as an attention function of transformers.

A step's tokens lie one after another: first the sequences with one token (decode), sorted by length, then the others
(chunks). Decode sequences are cut into groups whose gathered keys fit a core's cache; a group is one gather of rows
for the keys, one for the values and one attention call, whatever its size. Every chunk is a group of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from trtmesh.engine.backends.torch.kvcache import KvCache, Rows

NAME = "trtmesh_paged"
ATTRIBUTE = "trtmesh_attention"
GROUP_BYTES = 512 * 1024
"""Most bytes of gathered keys of a decode group; beyond that the copies fall out of a core's cache."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step, as the flat batch holds them.

    `slots`, `starts` and `counts` are [sequences]: block table rows, positions of the first tokens and numbers of
    tokens. The first `singles` sequences have one token each and come in order of length.
    """

    slots: Rows
    starts: Rows
    counts: Rows
    singles: int
    token_rows: Tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences with equally many tokens in the step that are attended to together.

    `rows` is [sequences * kv_heads * blocks], `mask` broadcasts to [sequences, 1, tokens, keys] and is added;
    `keys` and `values` are the workspace that the rows are gathered into, [sequences, kv_heads, keys, head_dim].
    A group without rows is the beginning of one sequence: its keys are those of the step itself.
    """

    first: int
    last: int
    tokens: int
    mask: Tensor | None
    rows: Tensor | None = None
    gathered_keys: Tensor | None = None
    gathered_values: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


class PagedAttention:
    """Attention of all layers of one model; `begin` says what the next forward computes."""

    def __init__(self, cache: KvCache, tables: Rows) -> None:
        self.cache = cache
        self._tables = tables
        self._dtype = cache.pool.dtype
        self._device = cache.pool.device
        self._workspace = [cache.pool.new_zeros(0), cache.pool.new_zeros(0)]
        self._step: StepTokens | None = None
        self._groups: dict[int | None, list[Group]] = {}

    def begin(self, step: StepTokens) -> None:
        self._step = step
        self._groups = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float | None,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """`query` [1, heads, tokens, head_dim], `key` and `value` with kv_heads; returns [1, tokens, heads, size]."""
        step = self._step
        if step is None:
            raise RuntimeError("attention ran outside a step")
        value_size = value.shape[-1]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        queries, keys, values = (self._per_token(tensor) for tensor in (query, key, value))
        self.cache.write(layer, step.token_rows, keys, values)
        groups = self._groups.get(sliding_window)
        if groups is None:
            groups = self._groups[sliding_window] = self._plan(step, sliding_window)
        outputs = []
        for group in groups:
            own = queries[group.first : group.last]
            if group.rows is None:
                # [1, kv_heads, tokens, head_dim]
                all_keys = keys[group.first : group.last].transpose(0, 1)[None]
                all_values = values[group.first : group.last].transpose(0, 1)[None]
            else:
                all_keys, all_values = self._gather(layer, group)
            outputs.append(
                _attend(own, all_keys, all_values, group, scale=scale, softcap=softcap, sinks=sinks)
            )
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output[None, ..., :value_size]

    def _per_token(self, tensor: Tensor) -> Tensor:
        """[1, heads, tokens, size] as [tokens, heads, head_dim]; a size below the cache's is filled with zeros."""
        per_token = tensor[0].transpose(0, 1)
        missing = self.cache.shape.head_dim - tensor.shape[-1]
        return pad(per_token, (0, missing)) if missing else per_token

    def _gather(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        key_rows, value_rows = self.cache.block_rows[layer]
        assert group.rows is not None
        assert group.keys is not None
        assert group.values is not None
        torch.index_select(key_rows, 0, group.rows, out=group.gathered_keys)
        torch.index_select(value_rows, 0, group.rows, out=group.gathered_values)
        return group.keys, group.values

    def _plan(self, step: StepTokens, window: int | None) -> list[Group]:
        """The groups of layers with this sliding window."""
        groups = []
        first = 0
        lengths = step.starts[: step.singles] + 1
        visible = lengths if window is None else np.minimum(lengths, window)
        size = self.cache.tokens_per_block
        # A window may begin inside a block, so it may touch one block more than its size says.
        blocks = np.minimum(-(-lengths // size), -(-(visible + size - 1) // size))
        while first < step.singles:
            last = self._group_end(blocks, first)
            groups.append(self._single_group(step, first, last, int(blocks[last - 1]), window))
            first = last
        token = step.singles
        for sequence in range(step.singles, len(step.slots)):
            count = int(step.counts[sequence])
            groups.append(self._chunk_group(step, sequence, token, count, window))
            token += count
        self._provide(groups)
        return groups

    def _group_end(self, blocks: Rows, first: int) -> int:
        """One past the last sequence of the group that begins at `first`; lengths do not fall."""
        shape = self.cache.shape
        block_bytes = shape.kv_heads * self.cache.tokens_per_block * shape.head_dim
        block_bytes *= self._dtype.itemsize
        last = first + 1
        while last < len(blocks):
            if int(blocks[last]) * (last + 1 - first) * block_bytes > GROUP_BYTES:
                break
            last += 1
        return last

    def _single_group(
        self, step: StepTokens, first: int, last: int, blocks: int, window: int | None
    ) -> Group:
        slots = step.slots[first:last]
        lengths = step.starts[first:last] + 1
        size = self.cache.tokens_per_block
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
        size = self.cache.tokens_per_block
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
            return Group(token, token + count, count, mask)
        slot = int(step.slots[sequence])
        table = self._tables[slot : slot + 1, first_key // size : last_key // size]
        return Group(token, token + count, count, mask, rows=self._rows(table))

    def _rows(self, table: Rows) -> Tensor:
        return torch.from_numpy(self.cache.rows_of_blocks(table).reshape(-1)).to(self._device)

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0))
        return torch.from_numpy(mask).to(self._device, self._dtype)

    def _provide(self, groups: list[Group]) -> None:
        """Gives each group its view of the workspace; groups run one after another, so they share it."""
        shape, size = self.cache.shape, self.cache.tokens_per_block
        row_size = size * shape.head_dim
        needed = max((len(group.rows) for group in groups if group.rows is not None), default=0)
        if needed * row_size > self._workspace[0].numel():
            # Some room to grow, so that lengthening sequences do not allocate every step.
            room = int(needed * row_size * 1.25)
            self._workspace = [self.cache.pool.new_empty(room) for _ in self._workspace]
        for number, group in enumerate(groups):
            if group.rows is None:
                continue
            sequences = group.last - group.first if group.tokens == 1 else 1
            flat = [space[: len(group.rows) * row_size] for space in self._workspace]
            heads = [view.view(sequences, shape.kv_heads, -1, shape.head_dim) for view in flat]
            gathered = [view.view(-1, row_size) for view in flat]
            groups[number] = Group(
                group.first,
                group.last,
                group.tokens,
                group.mask,
                group.rows,
                gathered[0],
                gathered[1],
                heads[0],
                heads[1],
            )


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    group: Group,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`queries` [rows, heads, head_dim], `keys` [sequences, kv_heads, keys, head_dim]; returns as `queries`.

    Query heads that share a key head become rows of one matrix, [sequences, kv_heads, tokens * shared, head_dim].
    """
    sequences, kv_heads = keys.shape[:2]
    rows, heads, size = queries.shape
    shared = heads // kv_heads
    packed = queries.reshape(sequences, group.tokens, kv_heads, shared, size).transpose(1, 2)
    packed = packed.reshape(sequences, kv_heads, group.tokens * shared, size)
    mask = group.mask
    if mask is not None and group.tokens > 1:
        mask = mask.repeat_interleave(shared, dim=2)
    if softcap is None and sinks is None:
        output = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    else:
        output = _explicit(packed, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)
    output = output.view(sequences, kv_heads, group.tokens, shared, -1).transpose(1, 2)
    return output.reshape(rows, heads, -1)


def _explicit(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with what the fused kernels cannot express: capped scores, and sinks that only take probability."""
    scores = torch.matmul(queries, keys.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        kv_heads, rows = scores.shape[1:3]
        # sinks is [heads]; rows are tokens of [shared] heads each.
        shared = sinks.numel() // kv_heads
        column = sinks.view(kv_heads, 1, shared).expand(-1, rows // shared, -1)
        column = column.reshape(1, kv_heads, rows, 1).expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat((scores, column.to(scores.dtype)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[2]], values)


def _dispatch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls; the module carries the attention of its own engine, so engines do not meet."""
    attention = getattr(module, ATTRIBUTE)
    output = attention.attend(
        module.layer_idx,
        query,
        key,
        value,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return output, None


def register() -> None:
    """Makes the name known to transformers; again does no harm."""
    AttentionInterface.register(NAME, _dispatch)


def attach(model: torch.nn.Module, attention: object) -> None:
    """Lets every layer of `model` use `attention`, which has `attend`."""
    for module in model.modules():
        setattr(module, ATTRIBUTE, attention)
