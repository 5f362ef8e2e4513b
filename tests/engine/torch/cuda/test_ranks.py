"""Ranks on two GPUs, with captured steps, give the tokens of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.mesh import DEMO
from engine.torch.harness import running
from engine.torch.parallel.choices import CONFIGS, FREE, NEW_TOKENS, together
from engine.torch.parallel.followers import gone, started
from engine.torch.parallel.moving import check_killed_rank_moves_items
from oracle import tiny_models
from processes import service_process
from trtmesh.engine.backends.torch.parallel.leading import LeadingCompute

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

TWO: dict[str, Any] = {"device": "cuda:0,cuda:1", "dtype": "float32", "max_batch_size": 20}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
async def test_families_equal_generate(tmp_path: Path, family: str) -> None:
    folder = tiny_models.build(tmp_path / family, family)
    prompts = tiny_models.prompts(17)
    model = tiny_models.reference_model(folder)
    expected = [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    async with running(folder, **TWO) as engine:
        compute: Any = engine.backend._loaded.engine._compute
        assert isinstance(compute, LeadingCompute)
        own: Any = compute._own
        assert own._graphs._replays
        assert own._chunks._replays
        for count in (1, 3, 17):
            assert await engine.run(prompts[:count], FREE) == expected[:count]


async def test_every_choice_is_that_of_one_gpu(llama: Path) -> None:
    """Launched ahead, the other rank gets the tokens that the first one has drawn on its GPU."""
    prompts = tiny_models.prompts(len(CONFIGS))
    async with running(llama, **{**TWO, "device": "cuda:0"}) as engine:
        expected = await together(engine, prompts)
    async with running(llama, **TWO) as engine:
        assert await together(engine, prompts) == expected
        assert await together(engine, prompts) == expected


async def test_a_killed_rank_moves_the_items_of_its_worker() -> None:
    await check_killed_rank_moves_items("cuda:0,cuda:1", "cuda:0", "--torch-dtype", "float32")


async def test_a_worker_stops_in_order() -> None:
    flags = ("--model-dir", str(DEMO), "--torch-kv-cache-tokens", "8192")
    async with service_process("engine", *flags, "--torch-device", "cuda:0,cuda:1") as engine:
        rank = await started(engine)
        assert await engine.stop() == 0
        await gone(rank)
