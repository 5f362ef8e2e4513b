"""Fused norms replace only norms with equal results."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trtmesh.engine.backends.torch.model.fused_layers import FusedNorm
from trtmesh.engine.backends.torch.model.fusing import fuse_norms

SIZE = 48


class WrongRMSNorm(LlamaRMSNorm):
    """Computes something different under the usual name."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = super().forward(hidden_states) + 1
        return normed


def model(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(5)
    llama: Any = LlamaRMSNorm
    gemma: Any = GemmaRMSNorm
    norms = nn.ModuleDict(
        {"llama": llama(SIZE, 1e-5), "gemma": gemma(SIZE), "layer": nn.LayerNorm(SIZE)}
        | {"wrong": WrongRMSNorm(SIZE, 1e-5)}
    )
    for weight in norms.parameters():
        nn.init.normal_(weight)
    return norms.to(dtype).requires_grad_(requires_grad=False)


def test_equivalent_norms_are_fused() -> None:
    plain, fused = model(torch.float32), model(torch.float32)
    fuse_norms(fused, FusedNorm)
    assert {name: type(norm) for name, norm in fused.items()} == {
        "llama": FusedNorm,
        "gemma": FusedNorm,
        "wrong": WrongRMSNorm,
        "layer": nn.LayerNorm,
    }
    for shape in ((1, 1, SIZE), (1, 37, SIZE), (1, 4, 3, SIZE)):
        # The second row is small enough for epsilon to matter.
        for given in (torch.randn(shape), torch.randn(shape) * 1e-3):
            for name in ("llama", "gemma"):
                torch.testing.assert_close(fused[name](given), plain[name](given))


def test_half_precision_keeps_its_own_rounding() -> None:
    norms = model(torch.bfloat16)
    fuse_norms(norms, FusedNorm)
    assert type(norms["llama"]) is LlamaRMSNorm
