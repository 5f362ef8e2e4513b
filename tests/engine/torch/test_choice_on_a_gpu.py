"""Rules choose the same tokens on a GPU as on a CPU, in any mixture, beside adapters, and where sequences move between
both. `pytest -m gpu --gpu cpu` tries these tests out on a CPU."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine.torch.combinations import some_tokens
from engine.torch.conftest import Device
from engine.torch.handoff_lab import workers
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from oracle.adapters import ON, Adapted, load_all
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.v1 import generation_pb2 as pb

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

NEW_TOKENS = 16
PART = 5
"""Tokens of a sequence before each move."""


def ruled(seed: int, **values: Any) -> GenerationConfig:
    return configure(max_tokens=NEW_TOKENS, ignore_end_id=True, seed=seed, **values)


BIASED: dict[str, Any] = {
    "embedding_bias_token_ids": ((7,), (9, 11)),
    "embedding_bias_weights": (1.5, -2.0),
}
RULES = [
    ruled(0),
    ruled(1, temperature=1.2),
    ruled(2, temperature=0.9, top_p=0.8),
    ruled(3, temperature=1.3, top_k=25),
    ruled(4, temperature=1.0, top_k=40, top_p=0.9, min_p=0.01),
    ruled(5, repetition_penalty=1.5),
    ruled(6, temperature=1.1, presence_penalty=0.8, frequency_penalty=0.4),
    ruled(7, temperature=1.1, frequency_penalty=0.9, prompt_ignore_length=3, top_p=0.95),
    ruled(8, temperature=1.0, min_tokens=9, bad_token_ids=((5,), (6,)), **BIASED),
    ruled(9, temperature=1.4, repetition_penalty=0.8, top_log_probs=5),
    ruled(10, repetition_penalty=1.3, no_repeat_ngram_size=2),
    ruled(11, temperature=0.9, top_p=0.9, top_p_decay=0.9),
]
"""Most are chosen by kernels, the last two by the host."""


async def together(
    engine: Harness, prompts: Sequence[Sequence[int]], configs: Sequence[GenerationConfig]
) -> list[list[int]]:
    keys: list[int] = []
    for prompt, config in zip(prompts, configs, strict=True):
        keys += engine.submit(prompt, config)
        await asyncio.sleep(0)
    return [stream.token_ids for stream in await engine.ended(keys)]


async def part(
    engine: Harness, prompts: Sequence[list[int]], emitted: Sequence[list[int]]
) -> list[list[int]]:
    """The tokens after some more from `engine`, which then stops its sequences."""
    found = list(emitted)
    rows = [row for row, tokens in enumerate(emitted) if len(tokens) < NEW_TOKENS]
    keys = {row: engine.submit(prompts[row], RULES[row], emitted=emitted[row])[0] for row in rows}
    for key in keys.values():
        await some_tokens(engine, key, PART)
    engine.backend.stop(list(keys.values()), pb.FINISH_REASON_STOPPED)
    for row, key in keys.items():
        (stream,) = await engine.ended([key])
        found[row] = emitted[row] + stream.token_ids
    return found


async def test_sequences_move_between_a_cpu_and_a_gpu(llama: Path, gpu: Device) -> None:
    """A slot of the device counts the tokens from elsewhere, and others than it counted before."""
    prompts = tiny_models.prompts(len(RULES), seed=3)
    async with running(llama) as on_cpu, running(llama, **gpu) as on_gpu:
        expected = await together(on_cpu, prompts, RULES)
        for engines in ((on_cpu, on_gpu), (on_gpu, on_cpu)):
            found: list[list[int]] = [[] for _ in prompts]
            turn = 0
            while any(len(tokens) < NEW_TOKENS for tokens in found):
                found = await part(engines[turn % 2], prompts, found)
                turn += 1
            assert turn > 1
            assert found == expected


async def test_sequences_are_handed_over_with_their_counts(llama: Path, gpu: Device) -> None:
    """With the KV of the prompt, from a CPU to a GPU."""
    prompts = tiny_models.prompts(len(RULES) + 1, seed=4)[1:]
    async with workers(llama, {}, gpu) as pair:
        expected = await together(pair.one, prompts, RULES)
        for prompt, config, ids in zip(prompts, RULES, expected, strict=True):
            lease = await pair.reserve(pair.one, pair.other, len(prompt))
            (before,) = await pair.one.ended(pair.one.submit(prompt, config, sender_lease_id=lease))
            keys = await pair.decode(pair.other, lease, prompt, before.token_ids, config)
            (after,) = await pair.other.ended(keys)
            assert before.token_ids + after.token_ids == ids


# PEFT reads a name that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
async def test_rules_beside_adapters(llama: Path, gpu: Device, tmp_path: Path) -> None:
    each = Adapted(llama, "llama", tmp_path / "adapters")
    dice = random.Random(5)
    configs = [
        replace(config, lora=each.by_number(dice.choice((0, 0, 1, 2, 3, 4)))) for config in RULES
    ]
    prompts = tiny_models.prompts(len(configs), seed=6)
    found = []
    for settings in ({}, gpu):
        async with running(llama, **{**settings, **ON}) as engine:
            await load_all(engine, each)
            found.append(await together(engine, prompts, configs))
    assert found[0] == found[1]
