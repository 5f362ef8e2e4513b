"""Greedy ids equal those of `generate` in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine.torch.conftest import Device
from engine.torch.harness import configure, running
from oracle import tiny_models

NEW_TOKENS = 12
DEMO = Path(__file__).parents[3] / "models" / "demo"
FREE = configure(max_tokens=NEW_TOKENS, ignore_end_id=True)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


# `compute/test_self_check.py` compares every architecture, in a smaller batch.
EVERY_RUN = ("llama", "gemma3", "gpt_oss")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in EVERY_RUN else [pytest.mark.soak])
        for family in sorted(tiny_models.FAMILIES)
    ],
)
async def test_families_equal_generate_with_1_3_and_17_requests(
    family: str, model_dir: Callable[[str], Path], device: Device
) -> None:
    folder = model_dir(family)
    prompts = tiny_models.prompts(17)
    model = tiny_models.reference_model(folder)
    async with running(folder, **device) as engine:
        few, more, all_ = [await engine.run(prompts[:count], FREE) for count in (1, 3, 17)]
    assert all_[:1] == few
    assert all_[:3] == more
    assert [len(ids) for ids in all_] == [NEW_TOKENS] * 17
    assert len({tuple(ids) for ids in all_}) > 8, "the oracle has nothing to say"
    for prompt, ids in zip(prompts, all_, strict=True):
        assert ids == tiny_models.likeliest(model, prompt, ids)


# The oracle compares it through a mesh.
@pytest.mark.soak
async def test_the_demo_model_equals_generate(device: Device) -> None:
    prompts = tiny_models.prompts(17, vocabulary_size=6144)
    model = tiny_models.reference_model(DEMO)
    expected = [tiny_models.greedy(model, prompt, 8) for prompt in prompts]
    async with running(DEMO, kv_cache_tokens=4096, **device) as engine:
        for count in (1, 3, 17):
            config = configure(max_tokens=8, ignore_end_id=True)
            assert await engine.run(prompts[:count], config) == expected[:count]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("max_step_tokens", [1, 7, 100_000])
async def test_the_size_of_chunks_changes_nothing(
    family: str, max_step_tokens: int, model_dir: Callable[[str], Path], device: Device
) -> None:
    folder = model_dir(family)
    prompts = tiny_models.prompts(6)
    model = tiny_models.reference_model(folder)
    async with running(folder, max_step_tokens=max_step_tokens, **device) as engine:
        found = await engine.run(prompts, FREE)
    for prompt, ids in zip(prompts, found, strict=True):
        assert len(ids) == NEW_TOKENS
        assert ids == tiny_models.likeliest(model, prompt, ids)


@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.soak)])
async def test_preemption_changes_nothing(
    family: str, model_dir: Callable[[str], Path], device: Device
) -> None:
    folder = model_dir(family)
    prompts = [prompt[:8] for prompt in tiny_models.prompts(9)]
    model = tiny_models.reference_model(folder)
    expected = [tiny_models.greedy(model, prompt, 40) for prompt in prompts]
    async with running(folder, kv_cache_tokens=64, tokens_per_block=4, **device) as engine:
        got = await engine.run(prompts, configure(max_tokens=40, ignore_end_id=True))
        scheduler = engine.backend._loaded.engine.scheduler
        assert scheduler.preemptions > 0
        assert got == expected
        assert engine.backend.stats().used_blocks == 0


@pytest.mark.parametrize("tokens_per_block", [1, 5, 64])
async def test_the_size_of_blocks_changes_nothing(
    llama: Path, tokens_per_block: int, device: Device
) -> None:
    prompts = tiny_models.prompts(5)
    model = tiny_models.reference_model(llama)
    expected = [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    async with running(llama, tokens_per_block=tokens_per_block, **device) as engine:
        assert await engine.run(prompts, FREE) == expected


async def test_the_end_id_ends_as_in_generate(llama: Path, device: Device) -> None:
    prompts = tiny_models.prompts(6)
    model = tiny_models.reference_model(llama)
    free = [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    end_id = free[1][4]
    expected = [
        tiny_models.greedy(model, prompt, NEW_TOKENS, eos_token_id=end_id) for prompt in prompts
    ]
    assert expected != free
    async with running(llama, **device) as engine:
        config = configure(max_tokens=NEW_TOKENS, end_id=end_id)
        assert await engine.run(prompts, config) == expected


async def test_the_models_own_end_ids_count_unless_ignored(tmp_path: Path) -> None:
    model = tiny_models.reference_model(tiny_models.build(tmp_path / "probe"))
    prompt = tiny_models.prompts(2)[1]
    free = tiny_models.greedy(model, prompt, NEW_TOKENS)
    folder = tiny_models.build(tmp_path / "model", eos_token_id=[free[3], 9])
    async with running(folder) as engine:
        assert engine.info.end_ids == (free[3], 9)
        ends, ignoring = configure(max_tokens=NEW_TOKENS), FREE
        stop = free.index(free[3]) + 1
        assert await engine.run([prompt], ends) == [free[:stop]]
        assert await engine.run([prompt], ignoring) == [free]
