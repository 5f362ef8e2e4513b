"""Attention of a flat batch over the paged cache: the part for every way to read the cache, and the gathering way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from trtmesh.engine.backends.torch.compute.grouping import DecodeCopies, Group, Grouping
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables, KvCache
from trtmesh.engine.backends.torch.model.attention import Rule, StepTokens


class CachedAttention(ABC):
    """Implements Attention, save for `attend_tokens`."""

    turns = False

    def __init__(self, cache: KvCache) -> None:
        self.cache = cache
        self._step: StepTokens | None = None
        self._written: Callable[[int], None] | None = None

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        self._step = step
        self._written = written

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        kv = torch.cat((self._per_token(key), self._per_token(value)), dim=1)
        output = self.attend_tokens(layer, self._per_token(query), kv, rule)
        return output[None, ..., : value.shape[-1]]

    @abstractmethod
    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor: ...

    def _write(self, layer: int, kv: Tensor) -> StepTokens:
        """Writes the step's keys and values of a layer to the cache; returns the step."""
        if self._step is None:
            raise RuntimeError("attention ran outside a step")
        self.cache.write(layer, self._step.token_rows, kv)
        if self._written:
            self._written(layer)
        return self._step

    def _per_token(self, tensor: Tensor) -> Tensor:
        """[1, heads, tokens, size] as [tokens, heads, head_dim], padded with zeros to the size of the cache."""
        per_token = tensor[0].transpose(0, 1)
        missing = self.cache.shape.head_dim - tensor.shape[-1]
        return pad(per_token, (0, missing)) if missing else per_token


UsesFused = Callable[[Tensor], bool]
"""Whether to use PyTorch's fused kernel for packed queries."""


class PagedAttention(CachedAttention):
    """Reads groups of sequences, gathered or copied."""

    def __init__(
        self,
        cache: KvCache,
        tables: BlockTables,
        dtype: torch.dtype,
        *,
        decode_copy_bytes: int,
        uses_fused: UsesFused,
    ) -> None:
        """`dtype` is the type of queries, keys and values."""
        super().__init__(cache)
        self._uses_fused = uses_fused
        copies = DecodeCopies(cache, tables, dtype, decode_copy_bytes)
        self._grouping = Grouping(cache, tables.rows, dtype, copies)
        self._groups: dict[int | None, list[Group]] = {}

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        super().begin(step, written)
        self._groups = {}

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        step = self._write(layer, kv)
        groups = self._groups.get(rule.window)
        if groups is None:
            groups = self._groups[rule.window] = self._grouping.groups(step, rule.window)
        if len(groups) == 1:
            return self._attend_group(layer, groups[0], queries, kv, rule)
        outputs = []
        for group in groups:
            own = slice(group.first, group.last)
            outputs.append(self._attend_group(layer, group, queries[own], kv[own], rule))
        return torch.cat(outputs)

    def _attend_group(
        self, layer: int, group: Group, queries: Tensor, kv: Tensor, rule: Rule
    ) -> Tensor:
        if group.copy is not None:
            keys, values = group.copy.take(layer, kv)
        elif group.rows is None:
            heads = kv.transpose(0, 1)[None]
            # Each [1, kv_heads, tokens, head_dim].
            keys, values = heads.chunk(2, dim=1)
        else:
            assert group.keys is not None
            assert group.values is not None
            assert group.gathered is not None
            torch.index_select(self.cache.block_rows[layer], 0, group.rows, out=group.gathered)
            if group.widened is not None:
                group.widened.copy_(group.gathered)
            keys, values = group.keys, group.values
        return self._attend(queries, keys, values, group, rule)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, group: Group, rule: Rule
    ) -> Tensor:
        """`queries` [rows, heads, head_dim], `keys` [sequences, kv_heads, keys, head_dim]; returns as `queries`.

        Query heads of the same key head become rows of a matrix, [sequences, kv_heads, tokens * shared, head_dim].
        """
        sequences, kv_heads = keys.shape[:2]
        rows, heads, size = queries.shape
        if group.causal and rule.plain:
            # The fused kernel skips hidden keys: more than the repeated keys cost.
            whole = queries.transpose(0, 1)[None]
            output = scaled_dot_product_attention(
                whole, keys, values, is_causal=True, scale=rule.scale, enable_gqa=heads != kv_heads
            )
            return output[0].transpose(0, 1)
        shared = heads // kv_heads
        mask = group.mask
        if group.tokens == 1:
            packed = queries.reshape(sequences, kv_heads, shared, size)
        else:
            packed = queries.reshape(sequences, group.tokens, kv_heads, shared, size).transpose(
                1, 2
            )
            packed = packed.reshape(sequences, kv_heads, group.tokens * shared, size)
            mask = None if mask is None else mask.repeat_interleave(shared, dim=2)
        if rule.plain and self._uses_fused(packed):
            output = scaled_dot_product_attention(
                packed, keys, values, attn_mask=mask, scale=rule.scale
            )
        else:
            output = _explicit(packed, keys, values, mask, rule)
        if group.tokens > 1:
            output = output.view(sequences, kv_heads, group.tokens, shared, -1).transpose(1, 2)
        return output.reshape(rows, heads, -1)


def _explicit(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rule: Rule
) -> Tensor:
    """Attention by batched products, with capped scores and sinks: the fused kernels have neither."""
    sequences, kv_heads, rows, size = queries.shape
    shape = (sequences, kv_heads, rows, keys.shape[2])
    transposed = keys.flatten(0, 1).transpose(1, 2)
    queries = queries.reshape(-1, rows, size)
    softcap, sinks = rule.softcap, rule.sinks
    if softcap is None and mask is not None:
        hidden = mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(hidden, queries, transposed, alpha=rule.scale).view(shape)
    else:
        scores = torch.bmm(queries, transposed).mul_(rule.scale).view(shape)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores += mask
    if sinks is not None:
        # sinks is [heads]; rows are tokens of [shared] heads each.
        shared = sinks.numel() // kv_heads
        column = sinks.view(kv_heads, 1, shared).expand(-1, rows // shared, -1)
        column = column.reshape(1, kv_heads, rows, 1).expand(scores.shape[0], -1, -1, -1)
        scores = torch.cat((scores, column.to(scores.dtype)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[2]], values)
