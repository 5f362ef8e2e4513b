"""A trial to show the order of additions in a product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def cancelling_trial(
    count: int, inputs: int, outputs: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rows [count, inputs] and a matrix [outputs, inputs] with products of 0: the computed values are rounding errors
    alone, and differ with the order of the additions."""
    generator = torch.Generator().manual_seed(0)
    half = inputs // 2
    place = torch.randperm(half, generator=generator)

    def spread(count: int) -> Tensor:
        scales = torch.randint(-4, 5, (count, half), generator=generator)
        return torch.randn(count, half, generator=generator) * torch.exp2(scales)

    rows, matrix = spread(count), spread(outputs)
    odd = inputs - 2 * half
    return (
        pad(torch.cat((rows, rows[:, place]), 1), (0, odd)).to(dtype),
        pad(torch.cat((matrix, -matrix[:, place]), 1), (0, odd)).to(dtype),
    )
