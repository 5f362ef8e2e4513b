"""With `batch_invariant`, tokens and log-probabilities are the same to the last bit in any traffic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from engine.torch.conftest import ModelDir
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from oracle.adapters import BASE, NUMBERS, ON, Adapted, load_all
from trtmesh.chassis.errors import ModelUnusable, SettingsError
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backends.torch import loading

NEW_TOKENS = 8
SAMPLED = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
]

Result = tuple[list[int], list[float]]

CPU: dict[str, Any] = {"batch_invariant": True, "threads": 2}
GPU: dict[str, Any] = {"batch_invariant": True, "device": "cuda:0"}
BOTH = ["float32", "bfloat16"]


def on_devices(soak: Collection[str] = (), **families: list[str]) -> pytest.MarkDecorator:
    """The types of each family on a CPU, some in `make soak` alone, and half precision on a GPU, where float32 is
    compared at load."""
    cases = [
        pytest.param(
            family,
            {**CPU, "dtype": dtype},
            id=f"{family}-{dtype}-cpu",
            marks=[pytest.mark.soak] if f"{family}-{dtype}" in soak else [],
        )
        for family, dtypes in families.items()
        for dtype in dtypes
    ]
    cases += [
        pytest.param(
            family,
            {**GPU, "dtype": dtype},
            id=f"{family}-{dtype}-gpu",
            marks=[pytest.mark.gpu, pytest.mark.slow],
        )
        for family in families
        for dtype in ("bfloat16", "float16")
    ]
    return pytest.mark.parametrize(("family", "settings"), cases)


def configs(count: int, adapted: Adapted | None = None) -> list[GenerationConfig]:
    """One after another with the adapters of `adapted`, or without."""
    shared = {"max_tokens": NEW_TOKENS, "ignore_end_id": True, "log_probs": True, "seed": 5}
    made = [configure(**shared, **SAMPLED[place % len(SAMPLED)]) for place in range(count)]
    numbers = (BASE, *NUMBERS) if adapted else (BASE,)
    return [
        replace(config, lora=adapted.by_number(numbers[place % len(numbers)]) if adapted else None)
        for place, config in enumerate(made)
    ]


def prompts(dice: Random) -> list[list[int]]:
    """Of 1 to 300 tokens, two with a common beginning."""
    lengths = (1, 2, 7, 40, 130, 300)
    made = [[dice.randrange(2, 320) for _ in range(length)] for length in lengths]
    return [*made, made[3] + made[2]]


async def result_of(engine: Harness, keys: list[int]) -> Result:
    streams = await engine.ended(keys)
    tokens = [token for stream in streams for token in stream.token_ids]
    log_probs = [value for stream in streams for each in stream.details for value in each.log_probs]
    return tokens, log_probs


async def alone(
    folder: Path, given: list[list[int]], adapted: Adapted | None = None, **settings: Any
) -> list[Result]:
    async with running(folder, prefix_reuse=False, max_batch_size=2, **settings) as engine:
        if adapted:
            await load_all(engine, adapted)
        return [
            await result_of(engine, list(engine.submit(prompt, config)))
            for prompt, config in zip(given, configs(len(given), adapted), strict=True)
        ]


async def in_traffic(
    folder: Path,
    given: list[list[int]],
    expected: list[Result],
    dice: Random,
    adapted: Adapted | None = None,
    **settings: Any,
) -> list[Result]:
    """All at once in random chunks and blocks with too little KV, and every second continued from a random token."""
    changed = {
        "max_step_tokens": dice.choice((3, 16, 60, 512)),
        "tokens_per_block": dice.choice((4, 16, 24)),
        "kv_cache_tokens": dice.choice((480, 4096)),
        "max_batch_size": dice.choice((3, 16)),
    }
    async with running(folder, **changed, **settings) as engine:
        if adapted:
            await load_all(engine, adapted)
        keys = []
        asked = zip(given, configs(len(given), adapted), strict=True)
        for place, (prompt, config) in enumerate(asked):
            cut = dice.randrange(1, NEW_TOKENS) if place % 2 else 0
            (key,) = engine.submit(prompt, config, emitted=expected[place][0][:cut])
            keys.append((key, cut))
        found = []
        for place, (key, cut) in enumerate(keys):
            tokens, log_probs = await result_of(engine, [key])
            before = expected[place]
            found.append((before[0][:cut] + tokens, before[1][:cut] + log_probs))
        return found


@on_devices(
    # Further down, llama has mates and adapters in half precision.
    soak=["llama-float32", "llama-bfloat16", "mistral-float32"],
    llama=BOTH,
    gemma2=["float32"],
    mistral=["float32"],
    gpt2=["float32"],
    qwen3=["bfloat16"],
    # On a GPU alone.
    mixtral=[],
    qwen3_moe=[],
)
async def test_tokens_and_log_probs_are_those_of_the_sequence_alone(
    family: str, settings: dict[str, Any], model_dir: ModelDir
) -> None:
    folder = model_dir(family)
    given = prompts(Random(family))
    expected = await alone(folder, given, **settings)
    assert await in_traffic(folder, given, expected, Random(0), **settings) == expected


@on_devices(soak=["llama-float32"], llama=BOTH)
async def test_mates_change_no_bit(
    family: str, settings: dict[str, Any], model_dir: ModelDir
) -> None:
    folder = model_dir(family)
    dice = Random(family)
    given = [[dice.randrange(2, 320) for _ in range(dice.randrange(1, 60))] for _ in range(18)]
    expected = await alone(folder, given, **settings)
    async with running(folder, max_batch_size=18, prefix_reuse=False, **settings) as engine:
        for mates in (3, 17):
            with engine.gate.held():
                asked = zip(given[: mates + 1], configs(mates + 1), strict=True)
                keys = [engine.submit(prompt, config) for prompt, config in asked]
            found = [await result_of(engine, list(each)) for each in keys]
            assert found == expected[: mates + 1]


# PEFT reads a name that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@on_devices(soak=["llama-float32", "gpt2-float32"], llama=BOTH, gpt2=["float32"])
async def test_tokens_and_log_probs_with_adapters_are_those_of_the_sequence_alone(
    family: str, settings: dict[str, Any], model_dir: ModelDir, tmp_path: Path
) -> None:
    """Each with the base or an adapter of another rank."""
    adapted = Adapted(model_dir(family), family, tmp_path)
    settings = {**settings, **ON}
    # Twice, so that sequences share an adapter.
    given = [*prompts(Random(family)), *prompts(Random(1))]
    expected = await alone(adapted.model_dir, given, adapted, **settings)
    assert expected[:4] != await alone(adapted.model_dir, given[:4], **settings)
    found = await in_traffic(adapted.model_dir, given, expected, Random(0), adapted, **settings)
    assert found == expected


async def test_without_it_the_last_bits_depend_on_the_traffic(llama: Path) -> None:
    given = prompts(Random("llama"))
    expected = await alone(llama, given, threads=2)
    found = await in_traffic(llama, given, expected, Random(0), threads=2)
    assert found != expected
    # Rounding alone: tokens flip only where two nearly tie.
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@pytest.mark.parametrize(
    ("family", "device"),
    [
        *((family, "cpu") for family in ("llama", "gemma2")),
        *(
            pytest.param(each, "cpu", marks=pytest.mark.soak)
            for each in ("mistral", "gpt2", "qwen3")
        ),
        *(
            pytest.param(family, "cuda:0", marks=[pytest.mark.gpu, pytest.mark.slow])
            for family in ("llama", "gemma2", "mistral", "gpt2", "qwen3", "mixtral", "qwen3_moe")
        ),
    ],
)
async def test_tokens_are_those_of_generate(family: str, device: str, model_dir: ModelDir) -> None:
    folder = model_dir(family)
    model = tiny_models.reference_model(folder)
    given = tiny_models.prompts(4)
    expected = [tiny_models.greedy(model, prompt, NEW_TOKENS) for prompt in given]
    settings: dict[str, Any] = {"batch_invariant": True, "dtype": "float32", "device": device}
    async with running(folder, max_batch_size=8, **settings) as engine:
        assert engine.info.capabilities.deterministic
        assert engine.info.capabilities.resumes_exactly
        free = configure(max_tokens=NEW_TOKENS, ignore_end_id=True)
        assert await engine.run(given, free) == expected


@pytest.mark.parametrize(
    ("family", "device"),
    [
        ("gpt_oss", "cpu"),
        ("mixtral", "cpu"),
        pytest.param("gpt_oss", "cuda:0", marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
)
async def test_a_model_whose_layers_look_at_the_whole_batch_is_refused(
    family: str, device: str, model_dir: ModelDir
) -> None:
    """Experts of transformers multiply as many rows as tokens chose them."""
    with pytest.raises(ModelUnusable, match="batch_invariant is refused"):
        async with running(model_dir(family), batch_invariant=True, device=device):
            pass


async def test_a_gpu_without_the_kernels_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(loading, "_with_kernels", lambda *_: None)
    with pytest.raises(SettingsError, match="do not run on cuda:0") as caught:
        async with running(llama, batch_invariant=True, device="cuda:0"):
            pass
    assert caught.value.setting == "engine.torch.batch_invariant"
