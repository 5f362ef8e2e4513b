"""Drafts change no bit of tokens and log-probabilities, and a sequence continues at any token with other drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine.torch.conftest import Device, ModelDir
from engine.torch.drafts.drafters import AnyLengths, Knowing, draft, drafting_of
from engine.torch.guided.guides import guided
from engine.torch.harness import configure, running
from engine.torch.test_batch_invariant import CPU, GPU, alone, in_traffic, prompts
from oracle import tiny_models
from oracle.adapters import ON, Adapted
from trtmesh.chassis.vocabulary import Draft
from trtmesh.engine.backends.torch import loading
from trtmesh.engine.backends.torch.drafts.drafting import MOST_GIVEN


@pytest.fixture
def any_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "AdaptiveLengths", AnyLengths)


# PEFT reads a name that transformers has renamed.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.usefixtures("any_lengths")
@pytest.mark.parametrize(
    "given_settings",
    [
        pytest.param({**CPU, "dtype": "float32"}, marks=pytest.mark.soak),
        {**CPU, "dtype": "bfloat16"},
        pytest.param({**GPU, "dtype": "bfloat16"}, marks=[pytest.mark.gpu, pytest.mark.slow]),
    ],
    ids=["float32", "bfloat16", "gpu"],
)
async def test_no_bit_changes_with_adapters(
    given_settings: dict[str, Any], model_dir: ModelDir, tmp_path: Path
) -> None:
    """Of adapters, batch mates, chunks, pauses and migrations; the drafts are those of the model without adapters."""
    adapted = Adapted(model_dir("llama"), "llama", tmp_path)
    given = [prompt for prompt in prompts(Random("drafts")) if len(prompt) < 300]
    settings: dict[str, Any] = {**given_settings, **ON}
    expected = await alone(adapted.model_dir, given, adapted, **settings)
    sources: list[dict[str, Any]] = [
        {"drafts": "suffix"},
        {"drafts": "model", "draft_model": adapted.model_dir},
    ]
    for seed, source in enumerate(sources):
        found = await in_traffic(
            adapted.model_dir, given, expected, Random(seed), adapted, **settings, **source
        )
        assert found == expected


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.3, "seed": 1},
        {"temperature": 1.5, "top_p": 0.9, "seed": 2, "frequency_penalty": 0.7},
    ],
    ids=["greedy", "cold", "hot and penalised"],
)
async def test_a_sequence_killed_at_every_token_continues_with_other_drafts(
    values: dict[str, Any], device: Device, llama: Path
) -> None:
    config = configure(max_tokens=30, ignore_end_id=True, log_probs=True, **values)
    prompt = tiny_models.prompts(2)[1]
    async with running(llama) as engine:
        (whole,) = await engine.ended(engine.submit(prompt, config))
    tokens = whole.token_ids
    sums = whole.end and whole.end.cumulative_log_prob
    settings: dict[str, Any] = {**device, "drafts": "ngram", "max_batch_size": 32}
    async with running(llama, **settings) as engine:
        draft(engine, Knowing({(0, 0): tokens}, 0.7), AnyLengths(3))
        keys = [engine.submit(prompt, config, emitted=tokens[:cut])[0] for cut in range(30)]
        for cut, stream in enumerate(await engine.ended(keys)):
            assert tokens[:cut] + stream.token_ids == tokens
            assert stream.end
            assert stream.end.cumulative_log_prob == pytest.approx(sums, abs=1e-3)
        counts = drafting_of(engine).counts
        assert 0 < counts.accepted_tokens < counts.draft_tokens
        assert sum(counts.accepted_by_position) == counts.accepted_tokens


async def test_sequences_of_a_guided_item_killed_at_every_token_continue_with_drafts(
    device: Device, llama: Path
) -> None:
    """Of n-grams and of forced runs, some of which hold."""
    schema = '{"type": "object", "properties": {"key": {"enum": ["one", "two"]}, "b": {"type": "integer"}}}'
    rules = {"temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.1, "seed": 6}
    several = guided("JSON_SCHEMA", schema, 1, max_tokens=40, num_return_sequences=3, **rules)
    alone_ = replace(several, sampling=replace(several.sampling, num_return_sequences=1))
    prompt = tiny_models.prompts(2)[1]
    async with running(llama) as engine:
        streams = await engine.ended(engine.submit(prompt, several))
    whole = [stream.token_ids for stream in streams]
    known = {(0, index): tokens for index, tokens in enumerate(whole)}
    settings: dict[str, Any] = {**device, "drafts": "ngram", "max_batch_size": 32}
    async with running(llama, **settings) as engine:
        draft(engine, Knowing(known, 0.7), AnyLengths(3))
        assert [s.token_ids for s in await engine.ended(engine.submit(prompt, several))] == whole
        for index, tokens in enumerate(whole):
            keys = [
                engine.submit(prompt, alone_, emitted=tokens[:cut], sequence_index=index)[0]
                for cut in range(1, len(tokens))
            ]
            for cut, stream in enumerate(await engine.ended(keys), 1):
                assert tokens[:cut] + stream.token_ids == tokens, (index, cut)
        counts = drafting_of(engine).counts
        assert 0 < counts.accepted_tokens < counts.draft_tokens


async def test_drafts_of_a_client_are_counted_at_every_position(llama: Path) -> None:
    config = configure(max_tokens=80, ignore_end_id=True)
    async with running(llama) as engine:
        (tokens,) = await engine.run([[5, 6, 7]], config)
        await engine.run([[5, 6, 7]], replace(config, draft=Draft(tuple(tokens))))
        stats = engine.backend.stats()
    # Of the second step all but the last token.
    second = len(tokens) - (MOST_GIVEN + 1) - 1
    assert stats.accepted_by_position == (2,) * second + (1,) * (MOST_GIVEN - second)
    assert sum(stats.accepted_by_position) == stats.accepted_draft_tokens
