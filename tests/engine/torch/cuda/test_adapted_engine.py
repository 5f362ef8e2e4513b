"""Sequences with adapters through captured steps: the tokens of PEFT, whatever is loaded, evicted and beside them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from engine.torch.conftest import ModelDir
from engine.torch.cuda.interpreted import recomputed
from engine.torch.cuda.launches import recorded
from engine.torch.harness import Harness, running
from oracle.adapters import NUMBERS, ON, PROMPTS, Adapted, asking, load, load_all
from trtmesh.engine.backends.torch.cuda.device import Cuda

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    # PEFT reads a name that transformers has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

OPTIONS: dict[str, Any] = {**ON, "device": "cuda:0", "dtype": "float32", "max_batch_size": 24}
ASKED = [(index % (1 + len(NUMBERS)), prompt) for index, prompt in enumerate(PROMPTS * 3)]


def captured(engine: Harness) -> tuple[int, int]:
    stats = engine.backend.stats()
    return stats.captured_steps, stats.step_count


@pytest.mark.parametrize("family", ["llama", "gemma2", "phi3", "gpt2"])
async def test_mixed_batch_equals_peft(family: str, model_dir: ModelDir, tmp_path: Path) -> None:
    each = Adapted(model_dir(family), family, tmp_path)
    expected = [each.greedy(number, prompt) for number, prompt in ASKED]
    async with running(each.model_dir, **OPTIONS, prefix_reuse=False) as engine:
        await load_all(engine, each)
        launches = recorded(engine.backend._loaded.engine._compute, ("forward", "follow"))
        before = captured(engine)
        with engine.gate.held():
            keys = [
                engine.submit(prompt, asking(each.by_number(number)))[0] for number, prompt in ASKED
            ]
        streams = await engine.ended(keys)
        assert [stream.token_ids for stream in streams] == expected
        # One after another: each joins those that decode.
        keys = []
        for number, prompt in ASKED:
            keys += engine.submit(prompt, asking(each.by_number(number)))
            await asyncio.sleep(0)
        assert [stream.token_ids for stream in await engine.ended(keys)] == expected
        steps, all_steps = (b - a for a, b in zip(before, captured(engine), strict=True))
    assert steps == all_steps
    assert "follow" in launches


async def test_adapters_loaded_and_evicted_beside_running_sequences(
    model_dir: ModelDir, tmp_path: Path
) -> None:
    """Two slots for four adapters: each arrives in a slot that steps have just read."""
    each = Adapted(model_dir("llama"), "llama", tmp_path)
    asked = [(NUMBERS[index % 4], PROMPTS[index % 8]) for index in range(40)]
    expected = [each.greedy(number, prompt) for number, prompt in asked]
    async with running(each.model_dir, **OPTIONS, max_batch_adapters=2) as engine:
        await load_all(engine, each)
        keys: list[int] = []
        for index, (number, prompt) in enumerate(asked):
            keys += engine.submit(prompt, asking(each.by_number(number)))
            if index % 8 == 7:
                await load(engine, number, each.contents[number])
        streams = await engine.ended(keys)
    assert [stream.token_ids for stream in streams] == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_captured_steps_equal_their_operations(
    dtype: str, model_dir: ModelDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = Adapted(model_dir("llama"), "llama", tmp_path)
    options = {**OPTIONS, "dtype": dtype, "prefix_reuse": False}

    async def run() -> list[list[int]]:
        async with running(each.model_dir, **options) as engine:
            await load_all(engine, each)
            found = []
            for count in (1, 3, 24):
                with engine.gate.held():
                    keys = [
                        engine.submit(prompt, asking(each.by_number(number or 1)))[0]
                        for number, prompt in ASKED[:count]
                    ]
                found += [stream.token_ids for stream in await engine.ended(keys)]
            return found

    expected = await run()
    monkeypatch.setattr(Cuda, "_recorder", lambda _: recomputed)
    assert await run() == expected
