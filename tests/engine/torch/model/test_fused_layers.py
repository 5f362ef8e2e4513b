"""Fused layers replace only layers with equal results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import tiny_models
from trtmesh.engine.backends.torch.cpu.device import Cpu
from trtmesh.engine.backends.torch.model.fused_layers import FusedAttention, FusedMlp
from trtmesh.engine.backends.torch.model.model import load_model
from trtmesh.engine.backends.torch.settings import TorchSettings

CPU = Cpu(TorchSettings())
FUSED = "llama mistral qwen2 qwen3 phi3 granite gemma gemma2 gemma3_text"
"""Also with biases, a window, norms of heads, a scale of their own, joined weights, norms after each half."""
LEFT = "gpt2 glm ministral3"
"""A different layer, interleaved rotation under known code, and queries scaled by position."""
PLAIN = "llama mistral qwen2 qwen3 phi3"


def kinds(folder: Path, dtype: torch.dtype = torch.float32) -> Counter[type]:
    model = load_model(folder, dtype, CPU.name, CPU.fit)
    return Counter(type(module) for module in model.module.modules())


def build(folder: Path, model_type: str) -> Path:
    values: dict[str, Any] = {**tiny_models.SHAPE, "tie_word_embeddings": True}
    tiny_models.build_type(folder, model_type, **values)
    return folder


@pytest.mark.parametrize("model_type", FUSED.split())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_layers_are_fused(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found = kinds(build(tmp_path, model_type), dtype)
    layers = tiny_models.SHAPE["num_hidden_layers"]
    assert found[FusedAttention] == found[FusedMlp] == layers


@pytest.mark.parametrize("model_type", [*FUSED.split(), "gpt2"])
def test_models_of_fused_layers_alone_are_plain(model_type: str, tmp_path: Path) -> None:
    """Gemma scales the embeddings and granite the logits, so their own code stays around the layers."""
    model = load_model(build(tmp_path, model_type), torch.float32, CPU.name, CPU.fit)
    assert model.plain == (model_type in PLAIN.split())


@pytest.mark.parametrize("model_type", LEFT.split())
def test_unknown_layers_are_kept(model_type: str, tmp_path: Path) -> None:
    assert not kinds(build(tmp_path, model_type))[FusedAttention]
