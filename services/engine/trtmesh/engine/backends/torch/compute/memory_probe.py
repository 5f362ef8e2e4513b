"""A step of the largest size before there is a KV cache, to see how much memory steps take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.memory.shortage import shortage
from trtmesh.engine.backends.torch.model.attention import Rule, StepTokens, attach
from trtmesh.engine.backends.torch.model.model import Model


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step."""

    tokens: int
    rows: int
    """Tokens with logits."""
    drafts: bool = False
    """Whether some of the tokens may be drafts of a source of the worker."""


class _NoAttention:
    """Implements Attention: attends to nothing."""

    turns = False

    def begin(self, step: StepTokens, written: Callable[[int], None] | None = None) -> None:
        raise NotImplementedError("there is no cache")

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        _, heads, tokens, _ = query.shape
        return query.new_zeros(1, tokens, heads, value.shape[-1])

    def attend_tokens(self, layer: int, queries: Tensor, kv: Tensor, rule: Rule) -> Tensor:
        return torch.zeros_like(queries, memory_format=torch.contiguous_format)


def probe(model: Model, size: StepSize, device: torch.device) -> Tensor:
    """Computes a step without attention; returns the logits [rows, vocabulary].

    Raises ModelUnusable where the model cannot run for another reason than a lack of memory.
    """
    attach(model.module, _NoAttention())
    if model.adapters:
        model.adapters.begin(())
    tokens = torch.zeros(size.tokens, dtype=torch.int64, device=device)
    rows = torch.arange(min(size.rows, size.tokens), device=device)
    try:
        with torch.inference_mode():
            return model.logits(tokens, tokens, rows)
    except Exception as error:
        if shortage(error) is not None:
            raise
        raise ModelUnusable(f"the model cannot run: {error}") from error
