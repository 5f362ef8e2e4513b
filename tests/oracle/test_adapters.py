"""Sequences of several adapters in one batch equal PEFT, each with its adapter alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from peft import LoraConfig, PeftModel, get_peft_model
from trtmesh.chassis.vocabulary import GenerationConfig, Lora, Tensor
from trtmesh.engine.adapters.arrays import write_arrays
from trtmesh.engine.adapters.lora import Lora as Weights
from trtmesh.engine.adapters.peft import read_peft
from trtmesh.v1 import generation_pb2 as pb

# PEFT reads a name that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

NEW_TOKENS = 10
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: Mapping[str, list[str]] = {
    "llama": LAYERS,
    "qwen2": LAYERS,
    "gemma2": LAYERS,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
RANKS = {1: 4, 2: 16, 3: 64}
"""By the number of the adapter."""
PROMPTS = tiny_models.prompts(8)
BASE = 0


class Adapted:
    """A model with adapters, in PEFT and as Triton's clients send them."""

    def __init__(self, model_dir: Path, family: str, folder: Path) -> None:
        self.model_dir = model_dir
        self.base = tiny_models.reference_model(model_dir)
        model: Any = None
        self.arrays: dict[int, Lora] = {}
        for number, rank in RANKS.items():
            config = LoraConfig(
                r=rank, lora_alpha=2 * rank, target_modules=TARGETS[family], task_type="CAUSAL_LM",
                use_rslora=number == 2, fan_in_fan_out=family == "gpt2",
            )  # fmt: skip
            if model is None:
                model = get_peft_model(
                    tiny_models.reference_model(model_dir), config, adapter_name=_name(number)
                )
            else:
                model.add_adapter(_name(number), config)
        generator = torch.Generator().manual_seed(7)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) / 16
        model.save_pretrained(folder)
        for number in RANKS:
            weights = read_peft(folder / _name(number), 1 << 30)
            self.arrays[number] = sent(number, weights)
        self.model: PeftModel = model.eval()

    def greedy(self, number: int, prompt: Sequence[int]) -> list[int]:
        if number == BASE:
            return tiny_models.greedy(self.base, list(prompt), NEW_TOKENS)
        self.model.set_adapter(_name(number))
        model: Any = self.model
        return tiny_models.greedy(model, list(prompt), NEW_TOKENS)

    def logits(self, number: int, tokens: Sequence[int]) -> torch.Tensor:
        self.model.set_adapter(_name(number))
        with torch.inference_mode():
            rows: torch.Tensor = self.model(torch.tensor([list(tokens)])).logits[0]
        return rows


def _name(number: int) -> str:
    # Not the number: PEFT then takes it for that of a layer.
    return f"adapter{number}"


def sent(number: int, weights: Weights) -> Lora:
    """An adapter with its weights, as Triton's clients send it."""
    rows, config = write_arrays(weights, torch.float32)
    return Lora(
        id=number,
        weights=Tensor(pb.DATA_TYPE_FP32, tuple(rows.shape), rows.numpy().tobytes()),
        config=Tensor(pb.DATA_TYPE_INT32, tuple(config.shape), config.numpy().tobytes()),
    )


def by_number(number: int) -> Lora | None:
    return Lora(id=number) if number != BASE else None


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """The adapted model of a family."""

    def build(family: str) -> Adapted:
        model_dir = tiny_models.build(tmp_path_factory.mktemp(family), family)
        return Adapted(model_dir, family, tmp_path_factory.mktemp(f"{family}-lora"))

    return cache(build)


def asking(lora: Lora | None, **options: Any) -> GenerationConfig:
    return replace(configure(max_tokens=NEW_TOKENS, **options), lora=lora)


async def load(harness: Harness, each: Adapted) -> None:
    """Sends every adapter once."""
    for lora in each.arrays.values():
        (stream,) = await harness.ended(harness.submit([3], asking(lora)))
        assert stream.end is not None
        assert stream.end.error is None, stream.end.error


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 5, "tokens_per_block": 4},
    # Small enough for sequences to be paused and recomputed.
    {"kv_cache_tokens": 80, "tokens_per_block": 4, "max_step_tokens": 7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "chunks", "pauses"])
@pytest.mark.parametrize("family", TARGETS)
async def test_mixed_batch_equals_peft(
    adapted: Callable[[str], Adapted], family: str, settings: dict[str, Any]
) -> None:
    each = adapted(family)
    asked = [(index % (1 + len(RANKS)), prompt) for index, prompt in enumerate(PROMPTS)]
    async with running(each.model_dir, **settings) as harness:
        await load(harness, each)
        with harness.gate.held():
            keys = [
                harness.submit(prompt, asking(by_number(number)))[0] for number, prompt in asked
            ]
        streams = await harness.ended(keys)
    expected = [each.greedy(number, prompt) for number, prompt in asked]
    assert [stream.token_ids for stream in streams] == expected
    differing = [each.greedy(BASE, prompt) for _, prompt in asked]
    assert sum(a != b for a, b in zip(expected, differing, strict=True)) >= len(asked) // 2
