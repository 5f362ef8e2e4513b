"""Ranks that share a model give the tokens of a single device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.harness import configure, running
from engine.torch.parallel.choices import CONFIGS, FREE, NEW_TOKENS, together
from oracle import tiny_models
from trtmesh.v1 import engine_pb2 as epb

SMALL = {"max_batch_size": 9, "tokens_per_block": 4, "max_step_tokens": 7}
"""Long prompts take several steps."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_every_choice_is_that_of_one_device_also_from_cached_blocks(llama: Path) -> None:
    prompts = tiny_models.prompts(len(CONFIGS))
    settings: dict[str, Any] = {**SMALL, "kv_cache_tokens": 1024}
    async with running(llama, **settings) as engine:
        expected = await together(engine, prompts)
    async with running(llama, device="cpu,cpu", **settings) as engine:
        shape = engine.backend._loaded.cache.shape
        assert shape.kv_heads == tiny_models.SHAPE["num_key_value_heads"] // 2
        # What a part of the KV and of the embeddings cannot give is not offered.
        assert engine.backend.kv_memory() is None
        assert [*engine.info.capabilities.roles] == [epb.WORKER_ROLE_MIXED]
        assert not any(each.startswith("prompt_tuning") for each in engine.info.supported_fields)
        assert await together(engine, prompts) == expected
        reused = engine.backend.stats().reused_prompt_tokens
        assert await together(engine, prompts) == expected
        assert engine.backend.stats().reused_prompt_tokens > reused


async def test_paused_sequences_and_evicted_blocks_change_nothing(llama: Path) -> None:
    prompts = [prompt[:8] for prompt in tiny_models.prompts(5)]
    model = tiny_models.reference_model(llama)
    expected = [tiny_models.greedy(model, prompt, 24) for prompt in prompts]
    settings: dict[str, Any] = {**SMALL, "kv_cache_tokens": 64, "host_cache_bytes": 2**16}
    async with running(llama, device="cpu,cpu", **settings) as engine:
        config = configure(max_tokens=24, ignore_end_id=True)
        assert await engine.run(prompts, config) == expected
        assert engine.backend._loaded.engine.scheduler.preemptions > 0
        # Blocks come back from the host's memory of every rank.
        assert await engine.run(prompts, config) == expected
        assert engine.backend.stats().used_host_blocks > 0


@pytest.mark.parametrize(
    ("family", "changes", "device"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, "cpu,cpu"),
        ("llama", {"num_key_value_heads": 4}, "cpu,cpu,cpu,cpu"),
        # The biases of qwen2 are some of those above, and windows do not depend on the heads of a rank.
        pytest.param("qwen2", {}, "cpu,cpu", marks=pytest.mark.soak),
        ("qwen3", {}, "cpu,cpu"),
        pytest.param("mistral", {}, "cpu,cpu", marks=pytest.mark.soak),
    ],
    ids=["biases", "four ranks", "qwen2", "qwen3", "mistral"],
)
async def test_families_equal_generate(
    family: str, changes: dict[str, Any], device: str, tmp_path: Path
) -> None:
    folder = with_biases(tiny_models.build(tmp_path, family, **changes))
    prompts = tiny_models.prompts(5)
    model = tiny_models.reference_model(folder)
    async with running(folder, device=device, **SMALL) as engine:
        found = await engine.run(prompts, FREE)
    for prompt, ids in zip(prompts, found, strict=True):
        assert len(ids) == NEW_TOKENS
        assert ids == tiny_models.likeliest(model, prompt, ids)


def with_biases(folder: Path) -> Path:
    """Gives the biases of a model values: new ones are 0, which a rank could add any number of times."""
    model = tiny_models.reference_model(folder)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.5, generator=generator)
    model.save_pretrained(folder)
    return folder


async def test_half_precision_has_the_clear_winners(llama: Path) -> None:
    prompts = tiny_models.prompts(6)
    model = tiny_models.reference_model(llama).bfloat16()
    expected = [tiny_models.greedy(model, prompt, 4) for prompt in prompts]
    async with running(llama, device="cpu,cpu", dtype="bfloat16", max_batch_size=8) as engine:
        got = await engine.run(prompts, configure(max_tokens=4, ignore_end_id=True))
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= 4
