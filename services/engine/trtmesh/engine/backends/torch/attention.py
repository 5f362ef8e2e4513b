"""Attention of a flat batch over the paged cache, as an attention function of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface
from trtmesh.engine.backends.torch.grouping import Group, Grouping, StepTokens
from trtmesh.engine.backends.torch.kvcache import KvCache, Rows

NAME = "trtmesh_paged"
ATTRIBUTE = "trtmesh_attention"
MANY_HEADS = 16
FEW_QUERIES = 16


class PagedAttention:
    """Attention of all layers of one model; `begin` says what the next forward computes."""

    def __init__(self, cache: KvCache, tables: Rows) -> None:
        self.cache = cache
        self._grouping = Grouping(cache, tables)
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
            groups = self._groups[sliding_window] = self._grouping.groups(step, sliding_window)
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
    if group.causal and softcap is None and sinks is None:
        # The fused kernel skips what is hidden, which pays for the keys that it repeats.
        whole = queries.transpose(0, 1)[None]
        output = scaled_dot_product_attention(
            whole, keys, values, is_causal=True, scale=scale, enable_gqa=heads != kv_heads
        )
        return output[0].transpose(0, 1)
    shared = heads // kv_heads
    packed = queries.reshape(sequences, group.tokens, kv_heads, shared, size).transpose(1, 2)
    packed = packed.reshape(sequences, kv_heads, group.tokens * shared, size)
    mask = group.mask
    if mask is not None and group.tokens > 1:
        mask = mask.repeat_interleave(shared, dim=2)
    if softcap is None and sinks is None and _small(packed):
        output = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
    else:
        output = _explicit(packed, keys, values, mask, scale=scale, softcap=softcap, sinks=sinks)
    output = output.view(sequences, kv_heads, group.tokens, shared, -1).transpose(1, 2)
    return output.reshape(rows, heads, -1)


def _small(queries: Tensor) -> bool:
    """Whether the fused kernel is the faster one: on a CPU it treats every head on its own, which costs most where many
    heads have few queries each; only in float32 is there a fast product of many matrices to do better with."""
    sequences, kv_heads, rows, _ = queries.shape
    if queries.is_cuda or queries.dtype != torch.float32:
        return True
    return sequences * kv_heads < MANY_HEADS or rows > FEW_QUERIES


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
    sequences, kv_heads, rows, size = queries.shape
    shape = (sequences, kv_heads, rows, keys.shape[2])
    transposed = keys.flatten(0, 1).transpose(1, 2)
    queries = queries.reshape(-1, rows, size)
    if softcap is None and mask is not None:
        hidden = mask.expand(-1, kv_heads, -1, -1).flatten(0, 1)
        scores = torch.baddbmm(hidden, queries, transposed, alpha=scale).view(shape)
    else:
        scores = torch.bmm(queries, transposed).mul_(scale).view(shape)
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


def _dispatch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - some models name it; what it hides is known here
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
