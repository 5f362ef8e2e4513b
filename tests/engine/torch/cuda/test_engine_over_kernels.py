"""The engine over the kernels in triton's interpreter: the tokens of the CPU, by the launches that a GPU gets."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.combinations import FAMILIES, Maker, check, frequent, lonely
from engine.torch.conftest import ModelDir
from engine.torch.cuda.interpreted import Interpreted, make_small, small_model
from engine.torch.cuda.launches import recorded
from engine.torch.drafts.drafters import SOURCES, AnyLengths, draft, drafting_of
from engine.torch.guided.guides import guided
from engine.torch.guided.lateness import SomeLate
from engine.torch.harness import Harness, configure, running
from oracle import tiny_models
from oracle.adapters import ON, Adapted, load_all
from tokenizers import Tokenizer
from trtmesh.engine.backends.torch import loading
from trtmesh.engine.backends.torch.cuda import run_graphs
from trtmesh.engine.backends.torch.cuda.device import Cuda
from trtmesh.engine.backends.torch.cuda.runner import GraphRunner
from trtmesh.v1 import generation_pb2 as pb

pytestmark = [
    pytest.mark.gpu,
    # Triton starts a C compiler.
    pytest.mark.slow,
    # Of triton's interpreter.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
    # Tokens that only fill up belong to no tile, and have what was in memory.
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]

NEW_TOKENS = 5
FREE = configure(max_tokens=NEW_TOKENS, ignore_end_id=True)
CONFIGS = [
    FREE,
    configure(max_tokens=4, ignore_end_id=True, temperature=1.1, seed=8),
    configure(max_tokens=4, ignore_end_id=True, temperature=1.0, seed=3, top_k=20),
    configure(max_tokens=4, ignore_end_id=True, repetition_penalty=1.4),
]
MANY = {"max_tokens": NEW_TOKENS, "ignore_end_id": True}
RULED = configure(
    max_tokens=NEW_TOKENS,
    min_tokens=3,
    seed=4,
    temperature=1.3,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    frequency_penalty=0.5,
    embedding_bias_token_ids=((7,), (9,)),
    embedding_bias_weights=(1.5, -2.0),
    bad_token_ids=((11,),),
    top_log_probs=3,
)
"""Every rule that kernels apply."""
OPTIONS: dict[str, Any] = {
    "max_batch_size": 4,
    "tokens_per_block": 4,
    "kv_cache_tokens": 512,
    "max_sequence_tokens": 64,
    "max_step_tokens": 40,
}


class OnCpu(Interpreted, Cuda):
    pass


@pytest.fixture
def small(device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    if device.type == "cuda":
        pytest.skip("test_engine.py runs engines on a GPU")
    return small_model(tmp_path, monkeypatch)


async def test_tokens_and_launches(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks shorter and longer than a graph's, alone, together, and beside decoding sequences."""
    dice = random.Random(1)
    prompts = [[dice.randrange(3, 300) for _ in range(length)] for length in (5, 21, 3, 33)]

    async def run(engine: Harness) -> list[list[int]]:
        found = await engine.run(prompts[1:2], FREE)
        found += await engine.run(prompts[:1], RULED)
        keys: list[int] = []
        for prompt, config in zip(prompts, CONFIGS, strict=True):
            keys += engine.submit(prompt, config)
            await asyncio.sleep(0)
        return found + [stream.token_ids for stream in await engine.ended(keys)]

    async with running(small, **OPTIONS) as engine:
        expected = await run(engine)
    monkeypatch.setattr(loading, "_device", lambda _: OnCpu(torch.device("cpu")))
    async with running(small, **OPTIONS) as engine:
        compute = engine.backend._loaded.engine._compute
        assert isinstance(compute, GraphRunner)
        launches = recorded(compute, ("forward", "follow"))
        before = engine.backend.stats()
        assert await run(engine) == expected
        after = engine.backend.stats()
    assert after.captured_steps - before.captured_steps == after.step_count - before.step_count
    # The prompt, and all tokens after the first.
    alone = ["forward", *(["follow"] * (NEW_TOKENS - 1))]
    assert launches[: 2 * NEW_TOKENS] == alone * 2


@pytest.mark.parametrize("late", [None, 1, 2])
async def test_steps_follow_those_of_rows_that_await_tokens(
    late: int | None, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guided rows, by kernels, and rows chosen by the host: their tokens are chosen in a step that was launched before
    those of the step before were read. One ends under its guide, another where its bans and its guide allow nothing.
    Guided rows sit out any steps, and end no launch ahead."""
    vocabulary = Tokenizer.from_file(str(small / "tokenizer.json")).get_vocab()
    bans = tuple((vocabulary[text],) for text in ("b", "ab") if text in vocabulary)
    configs = [
        guided("REGEX", "[a-z]*", temperature=1.2, seed=5, top_log_probs=2, **MANY),
        guided("REGEX", "[a-z ]*", repetition_penalty=1.4, min_p=0.01, **MANY),
        guided("CHOICE", '["ab", "cde"]', max_tokens=9),
        guided("REGEX", "ab", bad_token_ids=bans, max_tokens=9),
        configure(no_repeat_ngram_size=2, **MANY),
        configure(temperature=0.9, seed=2, log_probs=True, **MANY),
    ]
    prompts = [[7 + place, 5, 9] for place in range(len(configs))]

    async def run(engine: Harness) -> list[Any]:
        with engine.gate.held():
            keys = [engine.submit(*each)[0] for each in zip(prompts, configs, strict=True)]
        return [
            (
                stream.token_ids,
                stream.end and (stream.end.reason, str(stream.end.error)),
                [[ids for ids, _ in each.top_log_probs] for each in stream.details],
                [each.log_probs for each in stream.details],
            )
            for stream in await engine.ended(keys)
        ]

    options = {**OPTIONS, "max_batch_size": 6}
    async with running(small, **options) as engine:
        expected = await run(engine)
    monkeypatch.setattr(loading, "_device", lambda _: OnCpu(torch.device("cpu")))
    monkeypatch.setattr(loading, "_mask_threads", lambda _: 2)
    async with running(small, **options) as engine:
        loaded = engine.backend._loaded.engine
        if late is not None:
            loaded._masks = SomeLate(loaded._masks, late)
        launches = recorded(loaded._compute, ("forward", "follow"))
        found = await run(engine)
        sat_out = engine.backend.stats().late_masks
    assert late is None or sat_out > 0
    for one, other in zip(found, expected, strict=True):
        assert one[:3] == other[:3]
        assert one[3] == [pytest.approx(each, abs=1e-4) for each in other[3]]
    assert len(expected[3][0]) == 1
    assert expected[3][1][0] == pb.FINISH_REASON_ERROR
    assert "guided_decoding" in expected[3][1][1]
    # Guides are compiled beside the steps, so items begin one after another.
    assert launches.count("follow") >= 3


@pytest.mark.parametrize("source", ["often right", "absurd", "model"])
async def test_drafts_are_verified_by_graphs(
    source: str, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows chosen by the step's graph, by that of the rules, and by the host, beside prompts and without drafts."""
    configs = [
        configure(temperature=1.2, seed=5, **MANY),
        configure(temperature=0.9, seed=2, top_k=20, top_log_probs=2, min_tokens=3, max_tokens=7),
        configure(repetition_penalty=1.4, **MANY),
        guided("REGEX", "[a-z ]*", **MANY),
        configure(no_repeat_ngram_size=2, **MANY),
        configure(max_tokens=6, ignore_end_id=True),
    ]
    prompts = [[7 + place, 5, 9] * (1 + place) for place in range(len(configs))]

    async def run(engine: Harness) -> list[tuple[list[int], list[float]]]:
        keys: list[int] = []
        for place, (prompt, config) in enumerate(zip(prompts, configs, strict=True)):
            keys += engine.submit(prompt, config, batch_index=place)
            await asyncio.sleep(0)
        streams = await engine.ended(keys)
        # A run of tokens has its details together.
        return [
            (each.token_ids, [value for d in each.details for value in d.log_probs])
            for each in streams
        ]

    options: dict[str, Any] = {**OPTIONS, "drafts": "ngram"}
    if source == "model":
        options |= {"drafts": "model", "draft_model": small}
    async with running(small, **OPTIONS) as engine:
        expected = await run(engine)
    known = {(place, 0): tokens for place, (tokens, _) in enumerate(expected)}
    monkeypatch.setattr(run_graphs, "MOST_ROWS", 12)
    monkeypatch.setattr(loading, "_device", lambda _: OnCpu(torch.device("cpu")))
    async with running(small, **options) as engine:
        own: Any = drafting_of(engine).drafter
        # The interpreter takes more than the patience of steps.
        draft(
            engine, own.drafter if source == "model" else SOURCES[source](known, 1), AnyLengths(2)
        )
        compute = engine.backend._loaded.engine._compute
        assert isinstance(compute, GraphRunner)
        assert compute._runs
        launches = recorded(compute._runs, ("launch_runs",))
        found = await run(engine)
        stats = engine.backend.stats()
    for (tokens, log_probs), (expected_tokens, expected_log_probs) in zip(
        found, expected, strict=True
    ):
        assert tokens == expected_tokens
        assert log_probs == pytest.approx(expected_log_probs, abs=1e-4)
    assert launches
    assert stats.drafts >= len(launches)
    assert stats.accepted_draft_tokens or source == "absurd"


# PEFT reads a name that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "phi3"])
async def test_sequences_with_adapters_beside_others(
    family: str, small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if family != "llama":
        small = tiny_models.build(
            tmp_path / family, family, num_hidden_layers=1, num_key_value_heads=1
        )
    each = Adapted(small, family, tmp_path / "adapters")
    dice = random.Random(2)
    prompts = [[dice.randrange(3, 300) for _ in range(length)] for length in (5, 9, 3, 6)]

    async def run(engine: Harness) -> list[list[int]]:
        await load_all(engine, each)
        keys: list[int] = []
        for number, prompt in zip((1, 0, 4, 1), prompts, strict=True):
            lora = each.by_number(number)
            keys += engine.submit(prompt, replace(CONFIGS[number // 3], lora=lora))
            await asyncio.sleep(0)
        return [stream.token_ids for stream in await engine.ended(keys)]

    options = {**OPTIONS, **ON, "max_batch_adapters": 2}
    async with running(small, **options) as engine:
        expected = await run(engine)
    monkeypatch.setattr(loading, "_device", lambda _: OnCpu(torch.device("cpu")))
    async with running(small, **options) as engine:
        launches = recorded(engine.backend._loaded.engine._compute, ("forward", "follow"))
        before = engine.backend.stats()
        assert await run(engine) == expected
        after = engine.backend.stats()
    assert after.captured_steps - before.captured_steps == after.step_count - before.step_count
    assert "follow" in launches


async def test_any_combination_equals_each_item_alone(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, model_dir: ModelDir
) -> None:
    """Steps of which graphs compute a part: a round with log-probabilities and logits of prompts, bans and guides."""
    if device.type == "cuda":
        pytest.skip("test_any_combination.py of the folder above plays all rounds on a GPU")
    number = 1
    model = model_dir(FAMILIES[number])
    async with lonely(model) as engine:
        maker = Maker(number, await frequent(engine))
        settings = maker.settings()
        items = [maker.item(index) for index in range(9)]
        make_small(monkeypatch)
        monkeypatch.setattr(loading, "_device", lambda _: OnCpu(torch.device("cpu")))
        await check(items, settings, model, engine)
