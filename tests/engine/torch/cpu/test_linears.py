"""Linear layers in a CPU's fastest layout give the same results as before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from trtmesh.engine.backends.torch.cpu.linears import (
    SMALL_WEIGHT,
    HalfLinear,
    NativeLinear,
    PackedLinear,
    TransposedLinear,
    pack_linears,
    widen,
)

LARGE = SMALL_WEIGHT // 48 + 1


class Own(nn.Linear):
    """A subclass of unknown behaviour."""


def model(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(3)
    transposed: Any = Conv1D
    layers: dict[str, nn.Module] = {
        "plain": nn.Linear(48, 80, bias=False),
        "biased": nn.Linear(48, 33),
        "transposed": transposed(80, 48),
        "own": Own(48, 8),
        "large": nn.Linear(48, LARGE),
    }
    return nn.ModuleDict(layers).to(dtype)


TOKENS = [(1, 1, 48), (1, 2, 48), (5, 48), (1, 37, 48)]


@pytest.mark.parametrize("tokens", TOKENS)
@torch.inference_mode()
def test_packed_linears_compute_the_same(tokens: tuple[int, ...]) -> None:
    layers, packed = model(torch.float32), model(torch.float32)
    pack_linears(packed)
    given = torch.randn(tokens)
    for name, layer in layers.items():
        torch.testing.assert_close(packed[name](given), layer(given), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@torch.inference_mode()
def test_half_precision_computes_in_float32(
    tokens: tuple[int, ...], dtype: torch.dtype, close: float
) -> None:
    layers, wide = model(dtype), model(dtype)
    widen(wide)
    given = torch.randn(tokens)
    for name, layer in layers.items():
        got = wide[name](given)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, layer(given.to(dtype)).float(), atol=close, rtol=close)


@torch.inference_mode()
def test_widen_converts_everything_but_linears() -> None:
    layers: dict[str, nn.Module] = {"words": nn.Embedding(9, 4), "norm": nn.LayerNorm(4)}
    wide = nn.ModuleDict(layers).to(torch.bfloat16)
    words = wide["words"].get_parameter("weight")
    widen(wide)
    # Embedding rows, which are only copied, keep their type.
    assert wide["words"].get_parameter("weight") is words
    assert words.dtype == torch.bfloat16
    embedded = wide["words"](torch.tensor([1, 2]))
    assert torch.equal(embedded, words[1:3].float())
    assert wide["norm"](embedded).dtype == torch.float32


def test_linears_are_replaced_by_size_and_type() -> None:
    packed: Any = model(torch.float32)
    pack_linears(packed)
    assert type(packed["own"]) is Own
    for name in ("plain", "biased", "transposed"):
        assert type(packed[name]) is TransposedLinear
        assert packed[name].weight.dtype == torch.float32
    torch.testing.assert_close(packed["plain"].weight, model(torch.float32)["plain"].weight)
    assert type(packed["large"]) is PackedLinear
    # The self-check catches code that multiplies with the weight.
    assert packed["large"].weight.isnan().all()
    assert packed["large"].weight.shape == (LARGE, 48)


@torch.inference_mode()
def test_half_precision_with_instructions() -> None:
    layer = nn.Linear(64, 24, dtype=torch.bfloat16)
    other = NativeLinear(layer.weight, layer.bias)
    for count in (1, 2, 3, 40):
        given = torch.randn(1, count, 64, dtype=torch.bfloat16)
        torch.testing.assert_close(other(given), layer(given), atol=2e-2, rtol=2e-2)


def test_small_half_precision_weights_are_kept_in_float32_alone() -> None:
    wide = model(torch.float16)
    widen(wide)
    assert type(wide["plain"]) is TransposedLinear
    assert type(wide["large"]) is HalfLinear
