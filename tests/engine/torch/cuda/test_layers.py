"""Layers of kernels give what the layers of transformers give."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from trtmesh.engine.backends.torch.cuda.layers import (
    KernelHead,
    KernelNorm,
    LayerProducts,
    RotaryTable,
)

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

SIZE = 128


class Doubled(nn.Module):
    """A layer that is more than a product, as one with the updates of an adapter."""

    def __init__(self, own: nn.Linear) -> None:
        super().__init__()
        self.weight = own.weight
        self._own = own

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = 2 * self._own(given)
        return doubled


def linear(device: torch.device, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(SIZE, 2 * SIZE, bias=bias).to(device, torch.float16)
    layer.weight.data *= 3
    return layer.requires_grad_(requires_grad=False)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
@pytest.mark.parametrize("kind", ["plain", "bias", "more"])
@torch.inference_mode()
def test_products_with_norm_activation_and_sum(rows: int, kind: str, device: torch.device) -> None:
    products = LayerProducts(device)
    before = KernelNorm(torch.linspace(0.5, 2, SIZE, device=device), 1e-5)
    layer: nn.Module = linear(device, bias=kind == "bias")
    if kind == "more":
        layer = Doubled(linear(device))
    given = torch.randn(rows, SIZE, device=device).half() * 2
    outputs = layer(before(given))
    close(products.of_norm(given, before, layer), outputs)
    gate, up = outputs.float().chunk(2, 1)
    gated = (nn.functional.silu(gate) * up).half()
    close(products.of_norm(given, before, layer, gated=True), gated)
    hidden = torch.randn(rows, 2 * SIZE, device=device).half()
    expected = hidden + layer(given)
    close(products.sum(hidden, given, layer), expected)


@pytest.mark.parametrize("rows", [1, 3, 65])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_head(rows: int, bias: bool, device: torch.device) -> None:
    own = linear(device, bias=bias)
    head = KernelHead(LayerProducts(device), own)
    given = torch.randn(1, rows, SIZE, device=device).half()
    close(head(given), own(given))
    close(head(given[0]), own(given[0]))


@torch.inference_mode()
def test_table_of_positions(device: torch.device) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=512
    )
    own = LlamaRotaryEmbedding(config).to(device)
    hidden = torch.zeros(1, 4, 64, dtype=torch.bfloat16, device=device)
    positions = torch.tensor([[511, 0, 7, 300]], device=device)
    table = RotaryTable(own, 512, torch.bfloat16)
    for got, expected in zip(table(hidden, positions), own(hidden, positions), strict=True):
        assert torch.equal(got, expected)
