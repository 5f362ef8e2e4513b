"""The seam to transformers: a model calls attention by a registered name, and each engine attaches its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from trtmesh.engine.backends.torch.memory.kvcache import Rows

NAME = "trtmesh_paged"
ATTRIBUTE = "trtmesh_attention"


@dataclass(frozen=True, slots=True)
class Rule:
    """How a layer attends, apart from queries, keys and values."""

    scale: float
    window: int | None
    """Size of the sliding window, including the present token; None for all tokens."""
    softcap: float | None
    sinks: Tensor | None
    """A score per head, [heads], to take probability without adding a value."""

    @property
    def plain(self) -> bool:
        """Whether PyTorch's fused kernel can express the rule."""
        return self.softcap is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class StepTokens:
    """The tokens of a step in the order of the flat batch.

    `slots`, `starts` and `counts` are [sequences]: block table rows, positions of the first tokens, numbers of tokens.
    The first `singles` sequences have a token each and are sorted by length. `token_rows` is [tokens * 2 * kv_heads].
    """

    slots: Rows
    starts: Rows
    counts: Rows
    singles: int
    token_rows: Tensor


Angles = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions, each [1, tokens, turned dimensions]."""


class Attention(Protocol):
    """Attention of all layers of a model over the KV cache."""

    turns: bool
    """Whether this step's queries and keys are rotated by `attend_turning`, which takes those of `attend_tokens` and
    the angles."""

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        """Prepares for the next forward, with calls of `written` after writing the KV of each layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """`query` [1, heads, tokens, head_dim], `key` and `value` with kv_heads; returns [1, tokens, heads, size]."""

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        """`queries` [tokens, heads, head_dim], `kv` [tokens, 2 * kv_heads, head_dim]; returns as `queries`."""


def register() -> None:
    """Makes the name known to transformers; may be called again."""
    AttentionInterface.register(NAME, _dispatch)


def attach(model: torch.nn.Module, attention: object | None) -> None:
    """Sets the attention of every layer of `model`; None restores the model's own."""
    for module in model.modules():
        setattr(module, ATTRIBUTE, attention)


def _dispatch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - some models name it; the paged cache knows what is hidden
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Called by transformers. The attention hangs on the module, so engines in the same process stay apart."""
    attention = getattr(module, ATTRIBUTE)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = Rule(scale, sliding_window, softcap, s_aux)
    return attention.attend(module.layer_idx, query, key, value, rule), None
