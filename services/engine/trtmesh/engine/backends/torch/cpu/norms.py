"""Root-mean-square norms in four operations instead of the seven of transformers."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

PROBE_ROWS = 5
CLOSE = 1e-5
"""Largest difference from the original, as a share of the largest value: rounding."""


class FusedNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + epsilon) * weight, in float32.

    One kernel finds the length of a vector, so everything is scaled by the root of its size.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        super().__init__()
        size = len(weight)
        self.weight = nn.Parameter(weight * math.sqrt(size), requires_grad=False)
        self._least = torch.tensor(math.sqrt(size * epsilon), device=weight.device)

    def forward(self, hidden: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(hidden, 2, -1, True)  # noqa: FBT003 - twice as fast as by name
        return hidden.div(length.hypot_(self._least)).mul_(self.weight)


def fuse_norms(model: nn.Module) -> None:
    """Replaces the norms of a float32 model that compute the same."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)


def _fused(module: nn.Module) -> FusedNorm | None:
    """A FusedNorm that computes the same as `module`; None where there is none."""
    own: Any = module
    weight = getattr(own, "weight", None)
    epsilon = getattr(own, "variance_epsilon", getattr(own, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
        return None
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.dtype != torch.float32:
        return None
    if len(module.state_dict()) > 1 or len(inspect.signature(module.forward).parameters) > 1:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, PROBE_ROWS, len(weight), generator=generator).to(weight.device)
    # Small enough for epsilon to matter.
    rows[:, 0] *= math.sqrt(epsilon)
    with torch.inference_mode():
        expected = module(rows)
        # Gemma adds one to its weights.
        for each in (weight, 1 + weight):
            fused = FusedNorm(each, epsilon)
            if torch.allclose(fused(rows), expected, rtol=CLOSE, atol=CLOSE):
                return fused
    return None
