"""Norms are replaced where PyTorch's own gives the same bits, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from trtmesh.engine.backends.torch.norms import fuse_norms

SIZE = 48


def model(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(5)
    llama: Any = LlamaRMSNorm
    gemma: Any = GemmaRMSNorm
    norms = nn.ModuleDict(
        {"llama": llama(SIZE, 1e-5), "gemma": gemma(SIZE), "layer": nn.LayerNorm(SIZE)}
    )
    for weight in norms.parameters():
        nn.init.normal_(weight)
    return norms.to(dtype).requires_grad_(requires_grad=False)


def test_what_is_the_same_is_replaced() -> None:
    plain, fused = model(torch.float32), model(torch.float32)
    fuse_norms(fused)
    assert {name: type(norm) for name, norm in fused.items()} == {
        "llama": nn.RMSNorm,
        "gemma": GemmaRMSNorm,
        "layer": nn.LayerNorm,
    }
    for shape in ((1, 1, SIZE), (1, 37, SIZE), (1, 4, 3, SIZE)):
        given = torch.randn(shape)
        assert torch.equal(fused["llama"](given), plain["llama"](given))


def test_half_precision_keeps_its_own_rounding() -> None:
    norms = model(torch.bfloat16)
    fuse_norms(norms)
    assert type(norms["llama"]) is LlamaRMSNorm
