"""Adapters between PEFT's format and TensorRT-LLM's arrays, against the `peft` package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.adapters.test_arrays import same
from oracle import tiny_models
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.peft_adapter import CONFIG, WEIGHTS
from trtmesh.engine.adapters.arrays import CONFIG_FILE, WEIGHTS_FILE
from trtmesh.engine.adapters.lora import Module
from trtmesh.engine.adapters.peft import read_peft
from trtmesh.engine.backends.torch.model.adapter_conversion import convert

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

MOST = 1 << 30
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLAIN: Mapping[str, Any] = {"r": 4, "lora_alpha": 8}
PATTERNS: Mapping[str, Any] = {
    "r": 8,
    "lora_alpha": 12,
    "use_rslora": True,
    "rank_pattern": {"layers.1.self_attn.q_proj": 3, "down_proj": 5},
    "alpha_pattern": {"v_proj": 7},
}
ADAPTERS: Mapping[str, tuple[str, list[str], Mapping[str, Any]]] = {
    "llama": ("llama", LAYERS, PLAIN),
    "llama_rslora_patterns": ("llama", LAYERS, PATTERNS),
    "llama_q_and_v": ("llama", ["q_proj", "v_proj"], PLAIN),
    "qwen2": ("qwen2", LAYERS, PLAIN),
    "gemma2": ("gemma2", LAYERS, PATTERNS),
    "gpt2_conv1d": ("gpt2", ["c_attn", "c_proj", "c_fc"], PLAIN),
    "gpt2_attention": ("gpt2", ["attn.c_proj"], PLAIN),
    "phi3_fused": ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], PLAIN),
}


class Trained:
    """An adapter of random weights, saved by PEFT."""

    def __init__(self, folder: Path, case: str) -> None:
        family, targets, options = ADAPTERS[case]
        self.model_dir = tiny_models.build(folder / "model", family)
        self.directory = folder / "adapter"
        config = LoraConfig(
            target_modules=targets,
            task_type="CAUSAL_LM",
            fan_in_fan_out=family == "gpt2",
            **options,
        )
        adapted = get_peft_model(tiny_models.reference_model(self.model_dir), config).eval()
        generator = torch.Generator().manual_seed(2)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 4
        adapted.save_pretrained(str(self.directory))

    def logits(self, adapter: Path) -> Tensor:
        """The logits with an adapter, by PEFT."""
        base: Any = tiny_models.reference_model(self.model_dir)
        model: Any = PeftModel.from_pretrained(base, adapter).eval()
        with torch.no_grad():
            logits: Tensor = model(IDS).logits
        return logits


@pytest.mark.parametrize("case", ADAPTERS)
def test_there_and_back_is_the_same_adapter(case: str, tmp_path: Path) -> None:
    trained = Trained(tmp_path, case)
    convert(trained.directory, tmp_path / "arrays", "auto", None)
    convert(tmp_path / "arrays", tmp_path / "back", "auto", trained.model_dir)
    assert same(read_peft(tmp_path / "back", MOST), read_peft(trained.directory, MOST))
    assert (
        load_file(tmp_path / "back" / WEIGHTS).keys()
        == load_file(trained.directory / WEIGHTS).keys()
    )
    expected = trained.logits(trained.directory)
    torch.testing.assert_close(trained.logits(tmp_path / "back"), expected)


def test_arrays_are_those_of_hf_lora_convert(tmp_path: Path) -> None:
    """Module ids, A before B, alpha / r in B, zeros at the end, a leading 1."""
    trained = Trained(tmp_path, "llama")
    convert(trained.directory, tmp_path / "arrays", "float16", None)
    weights = np.load(tmp_path / "arrays" / WEIGHTS_FILE)
    config = np.load(tmp_path / "arrays" / CONFIG_FILE)
    tensors = load_file(trained.directory / WEIGHTS)
    ids = dict(zip(LAYERS, (1, 2, 3, 4, 5, 7, 6), strict=True))
    assert (weights.dtype, config.dtype) == (np.float16, np.int32)
    assert config.shape == (1, 2 * len(LAYERS), 3)
    rows = {
        (module, layer): (rank, row)
        for (module, layer, rank), row in zip(config[0].tolist(), weights[0], strict=True)
    }
    for layer in range(2):
        for name, module in ids.items():
            parent = "mlp" if module > 4 else "self_attn"
            key = f"base_model.model.model.layers.{layer}.{parent}.{name}.lora_{{}}.weight"
            a, b = tensors[key.format("A")], tensors[key.format("B")] * 2
            rank, row = rows[module, layer]
            values = torch.cat((a.flatten(), b.flatten())).half().numpy()
            assert rank == 4
            np.testing.assert_array_equal(row[: len(values)], values)
            assert not row[len(values) :].any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_stored_in_the_type(dtype: str, tmp_path: Path) -> None:
    trained = Trained(tmp_path, "llama_q_and_v")
    convert(trained.directory, tmp_path / "arrays", dtype, None)
    convert(tmp_path / "arrays", tmp_path / "back", "auto", trained.model_dir)
    types = {tensor.dtype for tensor in load_file(tmp_path / "back" / WEIGHTS).values()}
    assert types == {getattr(torch, dtype)}


def test_value_outside_the_type_is_refused_by_layer(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "llama_q_and_v")
    text = (trained.directory / CONFIG).read_text()
    (trained.directory / CONFIG).write_text(
        text.replace('"lora_alpha": 8', '"lora_alpha": 8388608')
    )
    with pytest.raises(InvalidRequest) as refused:
        convert(trained.directory, tmp_path / "arrays", "float16", None)
    assert refused.value.field == f"adapter.layer_0.{Module.ATTN_Q.name.lower()}"
    assert "float16" in refused.value.problem


def test_adapter_of_another_model_is_refused_by_layer(tmp_path: Path) -> None:
    trained = Trained(tmp_path, "llama_q_and_v")
    other = tiny_models.build(tmp_path / "other", "gpt2", n_embd=32)
    for source in (trained.directory, tmp_path / "arrays"):
        with pytest.raises(InvalidRequest) as refused:
            convert(source, tmp_path / "none", "auto", other)
        assert refused.value.field.startswith("adapter.layer_0.attn_q")
        convert(trained.directory, tmp_path / "arrays", "auto", None)
    assert not (tmp_path / "none").exists()
