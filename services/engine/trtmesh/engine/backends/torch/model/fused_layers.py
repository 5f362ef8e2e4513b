"""Attention, gated MLP, norm and decoder layers of transformers with fewer and larger operations.

With a small batch, the number of operations decides the duration of a step: each costs microseconds before computing
anything. So a product makes queries, keys and values, another gate and up, and a rotation turns queries and keys in
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from trtmesh.engine.backends.torch.model.attention import ATTRIBUTE, Angles, Rule


class FusedMlp(nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, own: Any) -> None:
        super().__init__()
        joined = getattr(own, "gate_up_proj", None)
        self.gate_up = joined or _joined([own.gate_proj, own.up_proj])
        self.act_fn = own.activation_fn if joined else own.act_fn
        self.down_proj = own.down_proj
        self._size = self.gate_up.out_features // 2

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self.down_proj(self.gated(self.gate_up(hidden)))
        return product

    def gated(self, both: Tensor) -> Tensor:
        """By the outputs of `gate_up`."""
        gated: Tensor = self.act_fn(both[..., : self._size]) * both[..., self._size :]
        return gated


class Rotation:
    """The norms and the rotary embedding of queries and keys; the latter prepared once per step for all layers."""

    def __init__(self) -> None:
        self._given: Tensor | None = None

    def norm(self, heads: Tensor, queries: int, of_queries: nn.Module, of_keys: nn.Module) -> None:
        """Replaces `heads` [tokens, heads, head_dim], `queries` of queries and then those of keys, by their norms."""
        for each, norm in ((heads[:, :queries], of_queries), (heads[:, queries:], of_keys)):
            each.copy_(norm(each))

    def turn(self, heads: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turns `heads` [tokens, heads, head_dim] in place; `cos` and `sin` are [1, tokens, turned dimensions].

        x * cos + rotate_half(x) * sin, with the signs of rotate_half moved to the sine.
        """
        if sin is not self._given:
            self._given = sin
            self._half = sin.shape[-1] // 2
            self._cos = cos[0].unsqueeze(1)
            self._sin = sin[0].unsqueeze(1).clone()
            self._sin[..., : self._half].neg_()
        if 2 * self._half < heads.shape[-1]:
            heads = heads[..., : 2 * self._half]
        swapped = heads.roll(self._half, -1)
        heads.mul_(self._cos).addcmul_(swapped, self._sin)


class FusedAttention(nn.Module):
    """Self-attention with rotary positions over a flat batch.

    `own`, the replaced layer, computes where no engine's attention is attached.
    """

    def __init__(self, own: Any, rule: Rule, rotation: Rotation) -> None:
        super().__init__()
        size = own.head_dim
        names = ["q_proj", "k_proj", "v_proj"]
        if joined := getattr(own, "qkv_proj", None):
            names = ["qkv_proj"]
            kv_heads = own.num_key_value_heads
            heads = kv_heads * own.num_key_value_groups
        else:
            kv_heads, heads = (own.k_proj.out_features // size, own.q_proj.out_features // size)
        self.qkv = joined or _joined([getattr(own, name) for name in names])
        self.o_proj = own.o_proj
        self.q_norm = getattr(own, "q_norm", None)
        self.k_norm = getattr(own, "k_norm", None)
        self.own = own
        setattr(self, ATTRIBUTE, None)
        self._shape = (-1, heads + 2 * kv_heads, size)
        self._heads = heads
        self._turned = heads + kv_heads
        self._layer = own.layer_idx
        self._rule = rule
        self._rotation = rotation
        first = 0
        for name in names:
            after = first + getattr(own, name).out_features
            setattr(own, name, _Part(lambda: self.qkv, first, after))
            first = after

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        attention = getattr(self, ATTRIBUTE)
        if attention is None:
            output: tuple[Tensor, None] = self.own(
                hidden_states, position_embeddings, attention_mask, **others
            )
            return output
        return self.o_proj(self.attended(self.qkv(hidden_states[0]), position_embeddings))[
            None
        ], None

    def attended(self, qkv: Tensor, angles: Angles) -> Tensor:
        """The inputs of `o_proj` by the outputs of `qkv`, [tokens, size] both; may change `qkv`."""
        attention = getattr(self, ATTRIBUTE)
        qkv = qkv.view(self._shape)
        queries = qkv[:, : self._heads]
        if self.q_norm is not None and self.k_norm is not None:
            self._rotation.norm(qkv[:, : self._turned], self._heads, self.q_norm, self.k_norm)
        kv = qkv[:, self._heads :]
        if attention.turns:
            attended = attention.attend_turning(self._layer, queries, kv, self._rule, angles)
        else:
            self._rotation.turn(qkv[:, : self._turned], *angles)
            attended = attention.attend_tokens(self._layer, queries, kv, self._rule)
        flat: Tensor = attended.flatten(1)
        return flat


class _Part(nn.Module):
    """Some outputs of a linear layer, as a layer."""

    def __init__(self, whole: Callable[[], nn.Module], first: int, last: int) -> None:
        super().__init__()
        self._whole = whole
        self._first, self._last = first, last

    def forward(self, hidden: Tensor) -> Tensor:
        product: Tensor = self._whole()(hidden)
        return product[..., self._first : self._last]


def _joined(layers: list[nn.Linear]) -> nn.Linear:
    """A linear layer with the outputs of several."""
    first = layers[0]
    weight = torch.cat([each.weight for each in layers])
    whole = nn.Linear(first.in_features, len(weight), bias=False, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if first.bias is not None:
        bias = torch.cat([each.bias for each in layers])
        whole.bias = nn.Parameter(bias, requires_grad=False)
    return whole


class FusedLayer(nn.Module):
    """A decoder layer without the code of transformers for training, in two halves. Only the first half needs other
    tokens than the tokens of its output."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.input_layernorm = own.input_layernorm
        self.self_attn = own.self_attn
        self.mlp = own.mlp
        # Gemma has norms of each half's output as well.
        norms_both = hasattr(own, "post_feedforward_layernorm")
        self.before_mlp = (
            own.pre_feedforward_layernorm if norms_both else own.post_attention_layernorm
        )
        self.after_attention = own.post_attention_layernorm if norms_both else None
        self.after_mlp = own.post_feedforward_layernorm if norms_both else None

    def forward(self, hidden: Tensor, position_embeddings: Angles, **others: Any) -> Tensor:
        """The call from transformers; `hidden` is [1, tokens, size]."""
        if getattr(self.self_attn, ATTRIBUTE) is None:
            attended, _ = self.self_attn(
                self.input_layernorm(hidden), position_embeddings, **others
            )
            hidden = _sum(hidden, attended, self.after_attention)
            return _sum(hidden, self.mlp(self.before_mlp(hidden)), self.after_mlp)
        rows = hidden[0]
        return self.complete(rows, self.attend(rows, position_embeddings))[None]

    def attend(self, hidden: Tensor, angles: Angles) -> Tensor:
        """Stores the keys and values of tokens; returns the result of attention, [tokens, size] as `hidden`."""
        attention = self.self_attn
        attended: Tensor = attention.attended(attention.qkv(self.input_layernorm(hidden)), angles)
        return attended

    def complete(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The output for tokens from the result of attention; may change `hidden`."""
        hidden = _sum(hidden, self.self_attn.o_proj(attended), self.after_attention)
        # Experts want the shape given by transformers.
        return _sum(hidden, self.mlp(self.before_mlp(hidden)[None])[0], self.after_mlp)


def _sum(hidden: Tensor, output: Tensor, norm: nn.Module | None) -> Tensor:
    return hidden + (norm(output) if norm else output)


class Norm(nn.Module):
    """x / sqrt(mean(x ** 2) + epsilon) * weight, in float32."""

    dtypes: ClassVar[tuple[torch.dtype, ...]]
    """Types of the weights of replaceable norms."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        """`weight` is float32."""
        super().__init__()


class FusedNorm(Norm):
    """A single kernel finds the length of a vector, so everything is scaled by the root of the size: four operations
    instead of the seven of transformers.
    """

    dtypes = (torch.float32,)

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__(weight, epsilon)
        size = len(weight)
        self.weight = nn.Parameter(weight * math.sqrt(size), requires_grad=False)
        self._least = torch.tensor(math.sqrt(size * epsilon), device=weight.device)

    def forward(self, hidden: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(hidden, 2, -1, True)  # noqa: FBT003 - twice as fast as by name
        return hidden.div(length.hypot_(self._least)).mul_(self.weight)
