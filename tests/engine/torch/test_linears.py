"""Linear layers in the layout that a CPU multiplies fastest compute what they computed before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from trtmesh.engine.backends.torch.linears import (
    HalfLinear,
    NativeLinear,
    PackedLinear,
    TransposedLinear,
    pack_linears,
)


class Own(nn.Linear):
    """Somebody's linear layer that may compute anything."""


def model(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(3)
    transposed: Any = Conv1D
    layers: dict[str, nn.Module] = {
        "plain": nn.Linear(48, 80, bias=False),
        "biased": nn.Linear(48, 33),
        "transposed": transposed(80, 48),
        "own": Own(48, 8),
        "large": nn.Linear(48, 8192),
    }
    return nn.ModuleDict(layers).to(dtype)


@pytest.mark.parametrize("tokens", [(1, 1, 48), (1, 2, 48), (5, 48), (1, 37, 48)])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@torch.inference_mode()
def test_the_product_is_the_same(tokens: tuple[int, ...], dtype: torch.dtype, close: float) -> None:
    layers, packed = model(dtype), model(dtype)
    pack_linears(packed, copies=True)
    given = torch.randn(tokens, dtype=dtype)
    for name, layer in layers.items():
        got = packed[name](given)
        assert got.dtype == dtype
        torch.testing.assert_close(got, layer(given), atol=close, rtol=close)


def test_what_is_replaced() -> None:
    packed: Any = model(torch.float32)
    pack_linears(packed, copies=False)
    assert type(packed["own"]) is Own
    for name in ("plain", "biased", "transposed"):
        assert type(packed[name]) is TransposedLinear
        assert packed[name].weight.dtype == torch.float32
    torch.testing.assert_close(packed["plain"].weight, model(torch.float32)["plain"].weight)
    assert type(packed["large"]) is PackedLinear
    # Code that multiplies with the weight itself is caught by the self-check.
    assert packed["large"].weight.isnan().all()
    assert packed["large"].weight.shape == (8192, 48)


@pytest.mark.parametrize("kind", [HalfLinear, NativeLinear])
@torch.inference_mode()
def test_half_precision_with_and_without_instructions(kind: type[nn.Module]) -> None:
    layer = nn.Linear(64, 24, dtype=torch.bfloat16)
    other = kind(layer.weight, layer.bias)
    for count in (1, 2, 3, 40):
        given = torch.randn(1, count, 64, dtype=torch.bfloat16)
        torch.testing.assert_close(other(given), layer(given), atol=2e-2, rtol=2e-2)
