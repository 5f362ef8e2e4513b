"""Adapters of tiny models: computed by PEFT, and loaded as contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine.torch.harness import Harness, configure
from oracle import tiny_models
from peft import LoraConfig, PeftModel, get_peft_model
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.vocabulary import Adapter, GenerationConfig, Lora, Tensor
from trtmesh.engine.adapters.arrays import write_arrays
from trtmesh.engine.adapters.lora import Lora as Weights
from trtmesh.engine.adapters.peft import read_peft
from trtmesh.engine.backend import AdapterLoad, HeldAdapter
from trtmesh.v1 import generation_pb2 as pb

NEW_TOKENS = 10
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FAMILIES: Mapping[str, list[str]] = {
    "llama": LAYERS,
    "qwen2": LAYERS,
    "gemma2": LAYERS,
    "gemma3": LAYERS,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
"""The updated layers by family."""
BASE = 0
NUMBERS = (1, 2, 3, 4)
PROMPTS = tiny_models.prompts(8)
ON: dict[str, Any] = {"adapters_host_bytes": 1 << 30}


def _configs(family: str) -> dict[int, LoraConfig]:
    """By the number of the adapter."""
    layers = FAMILIES[family]
    own: dict[int, dict[str, Any]] = {
        1: {"r": 4, "lora_alpha": 8},
        2: {"r": 16, "lora_alpha": 32, "use_rslora": True},
        3: {"r": 64, "lora_alpha": 128},
        4: {
            "r": 8,
            "lora_alpha": 4,
            "rank_pattern": {layers[0]: 32, layers[-1]: 5},
            "alpha_pattern": {layers[0]: 8, layers[1]: 24},
        },
    }
    shared: dict[str, Any] = {
        "target_modules": layers,
        "task_type": "CAUSAL_LM",
        "fan_in_fan_out": family == "gpt2",
    }
    return {number: LoraConfig(**shared, **each) for number, each in own.items()}


class Adapted:
    """A model with the adapters NUMBERS, in PEFT and as contents: two of each format."""

    def __init__(self, model_dir: Path, family: str, folder: Path) -> None:
        self.model_dir = model_dir
        self.base = tiny_models.reference_model(model_dir)
        model: Any = None
        for number, config in _configs(family).items():
            if model is None:
                own = tiny_models.reference_model(model_dir)
                model = get_peft_model(own, config, adapter_name=_name(number))
            else:
                model.add_adapter(_name(number), config)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 16
        model.save_pretrained(folder)
        self.contents = {
            number: AdapterContent.read(folder / _name(number), 1 << 30) for number in NUMBERS
        }
        for number in (3, 4):
            self.contents[number] = arrays(read_peft(folder / _name(number), 1 << 30))
        self.model: PeftModel = model.eval()
        self._greedy = dict[tuple[int, ...], list[int]]()
        """By number and prompt: several settings must give them."""

    def by_number(self, number: int) -> Lora | None:
        """An adapter as an item names it."""
        return named(number, self.contents[number]) if number != BASE else None

    def choose(self, number: int) -> Any:
        """The model with one of its adapters, or without."""
        if number == BASE:
            return self.base
        self.model.set_adapter(_name(number))
        return self.model

    def greedy(self, number: int, prompt: Sequence[int]) -> list[int]:
        key = number, *prompt
        if key not in self._greedy:
            self._greedy[key] = tiny_models.greedy(self.choose(number), list(prompt), NEW_TOKENS)
        return self._greedy[key]

    def logits(self, number: int, tokens: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            rows: torch.Tensor = self.choose(number)(torch.tensor([list(tokens)])).logits[0]
        return rows


def _name(number: int) -> str:
    # Not the number: PEFT then takes it for that of a layer.
    return f"adapter{number}"


def arrays(weights: Weights) -> AdapterContent:
    """An adapter as Triton's clients send it."""
    rows, config = write_arrays(weights, torch.float32)
    return AdapterContent.of_arrays(
        Tensor(pb.DATA_TYPE_FP32, tuple(rows.shape), rows.numpy().tobytes()),
        Tensor(pb.DATA_TYPE_INT32, tuple(config.shape), config.numpy().tobytes()),
    )


def named(number: int, content: AdapterContent) -> Lora:
    return Lora(id=number, version=content.version)


def asking(lora: Lora | None, **options: Any) -> GenerationConfig:
    return replace(configure(max_tokens=NEW_TOKENS, ignore_end_id=True, **options), lora=lora)


async def answer(harness: Harness, number: int, content: AdapterContent) -> HeldAdapter:
    """Loads an adapter; the state that answers."""
    identity, before = Adapter(number, version=content.version), len(harness.outputs)
    harness.backend.load_adapter(AdapterLoad(identity, content))

    def answers() -> list[HeldAdapter]:
        told = (each for output in harness.outputs[before:] for each in output.adapters)
        return [each for each in told if each.adapter == identity]

    await harness.until(answers)
    return answers()[0]


async def load(harness: Harness, number: int, content: AdapterContent) -> None:
    assert (await answer(harness, number, content)).error is None


async def load_all(harness: Harness, each: Adapted) -> None:
    for number, content in each.contents.items():
        await load(harness, number, content)
