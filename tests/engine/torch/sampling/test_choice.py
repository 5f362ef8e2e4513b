"""Sampling: distribution, draws, penalties and log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.choosing import continuation, filtered_weights
from engine.torch.harness import configure, running
from oracle import tiny_models
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling
from trtmesh.engine.backends.torch.accelerator import ORDERING
from trtmesh.engine.backends.torch.cuda.choice import GraphChoice
from trtmesh.engine.backends.torch.sampling.choice import Chooser, adjusted, most_likely

NEW_TOKENS = 24
SAMPLED = configure(max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.5, top_p=0.95, seed=7)


def warped(sampling: Sampling, logits: torch.Tensor) -> torch.Tensor:
    """The same filters by transformers."""
    warpers: list[LogitsProcessor] = []
    if sampling.temperature is not None:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        call: Any = warper
        logits = call(None, logits)
    return logits


CONFIGS = [
    Sampling(temperature=0.7),
    Sampling(top_k=5),
    Sampling(top_k=5000),
    Sampling(top_p=0.5),
    Sampling(top_p=0.999),
    Sampling(min_p=0.1),
    Sampling(temperature=1.3, top_k=40, top_p=0.8, min_p=0.02),
    Sampling(temperature=100.0, top_p=0.9),
]


@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_the_filtered_distribution_is_that_of_transformers(spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(CONFIGS), 1000, generator=generator) * spread
    weights = filtered_weights(CONFIGS, logits)
    probabilities = weights / weights.sum(dim=1, keepdim=True)
    for row, sampling in enumerate(CONFIGS):
        expected = warped(sampling, logits[row : row + 1].double()).softmax(dim=1)[0]
        torch.testing.assert_close(probabilities[row], expected)


async def test_a_sampled_stream_is_the_same_alone_and_among_16_others(llama: Path) -> None:
    prompts = tiny_models.prompts(17)
    async with running(llama) as engine:
        (alone,) = await engine.run(prompts[:1], SAMPLED)
        assert await engine.run(prompts[:1], SAMPLED) == [alone]
        others = [engine.submit(p, SAMPLED, batch_index=i)[0] for i, p in enumerate(prompts[1:], 1)]
        (key,) = engine.submit(prompts[0], SAMPLED)
        streams = await engine.ended([key, *others])
        assert streams[0].token_ids == alone
        assert len({tuple(stream.token_ids) for stream in streams}) == 17


async def test_seed_batch_index_and_sequence_index_each_make_another_stream(llama: Path) -> None:
    prompt = tiny_models.prompts(1)[0]
    other_seed = configure(
        max_tokens=NEW_TOKENS, ignore_end_id=True, temperature=1.5, top_p=0.95, seed=8
    )
    async with running(llama) as engine:
        keys = [
            engine.submit(prompt, SAMPLED),
            engine.submit(prompt, other_seed),
            engine.submit(prompt, SAMPLED, batch_index=1),
            engine.submit(prompt, SAMPLED, sequence_index=1),
        ]
        streams = await engine.ended([key for (key,) in keys])
        assert len({tuple(stream.token_ids) for stream in streams}) == 4


async def test_num_return_sequences_gives_independent_streams(llama: Path) -> None:
    prompt = tiny_models.prompts(2)[1]
    three = configure(
        max_tokens=8, ignore_end_id=True, temperature=1.5, seed=7, num_return_sequences=3
    )
    one = configure(max_tokens=8, ignore_end_id=True, temperature=1.5, seed=7)
    async with running(llama) as engine:
        together = await engine.ended(engine.submit(prompt, three))
        apart = await engine.ended(
            [engine.submit(prompt, one, sequence_index=index)[0] for index in range(3)]
        )
        assert [s.token_ids for s in together] == [s.token_ids for s in apart]
        assert len({tuple(s.token_ids) for s in together}) == 3


@pytest.mark.parametrize("forbidding", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
async def test_filters_that_leave_one_token_are_greedy(
    llama: Path, forbidding: dict[str, float]
) -> None:
    prompts = tiny_models.prompts(2)
    async with running(llama) as engine:
        greedy = await engine.run(prompts, configure(max_tokens=8, ignore_end_id=True))
        config = configure(max_tokens=8, ignore_end_id=True, seed=3, **forbidding)
        assert await engine.run(prompts, config) == greedy


async def test_the_repetition_penalty_is_that_of_generate(llama: Path) -> None:
    prompts = tiny_models.prompts(4)
    model = tiny_models.reference_model(llama)
    expected = [
        tiny_models.greedy(model, prompt, NEW_TOKENS, repetition_penalty=1.7) for prompt in prompts
    ]
    config = configure(max_tokens=NEW_TOKENS, ignore_end_id=True, repetition_penalty=1.7)
    async with running(llama) as engine:
        plain = await engine.run(prompts, configure(max_tokens=NEW_TOKENS, ignore_end_id=True))
        assert plain != expected
        assert await engine.run(prompts, config) == expected


@pytest.mark.parametrize("ignored", [None, 0, 1, 2, 9])
def test_penalties_follow_the_rule_of_tensorrt_llm(ignored: int | None) -> None:
    """The prompt is 0 1 0, and 1 was generated: repetition counts all, presence and frequency what is not ignored."""
    sampling = Sampling(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.25,
        prompt_ignore_length=ignored,
    )
    row = continuation([0, 1, 0, 1], GenerationConfig(sampling=sampling), 3)
    row.remember()
    logits = torch.tensor([[4.0, 4.0, 4.0]])
    counted = [*[0, 1, 0][3 if ignored is None else ignored :], 1]
    expected = [
        (4.0 / 2.0 if token in (0, 1) else 4.0)
        - (token in counted) * 1.0
        - counted.count(token) * 0.25
        for token in range(3)
    ]
    assert adjusted([row], logits).tolist() == [expected]


@pytest.mark.parametrize(
    ("presence", "frequency", "ignored"), [(3.0, 0.0, None), (0.0, 1.5, 0), (1.0, 0.7, 3)]
)
async def test_presence_and_frequency_penalties_follow_their_formula(
    llama: Path, presence: float, frequency: float, ignored: int | None
) -> None:
    prompt = tiny_models.prompts(2)[1]
    model = tiny_models.reference_model(llama)
    tokens: list[int] = []
    for _ in range(NEW_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, -1].double()
        counted = prompt[len(prompt) if ignored is None else ignored :] + tokens
        for token, count in Counter(counted).items():
            logits[token] -= presence + frequency * count
        tokens.append(int(logits.argmax()))
    config = configure(
        max_tokens=NEW_TOKENS,
        ignore_end_id=True,
        presence_penalty=presence,
        frequency_penalty=frequency,
        **({} if ignored is None else {"prompt_ignore_length": ignored}),
    )
    async with running(llama) as engine:
        plain = await engine.run([prompt], configure(max_tokens=NEW_TOKENS, ignore_end_id=True))
        assert plain != [tokens]
        assert await engine.run([prompt], config) == [tokens]


async def test_log_probs_are_those_of_the_models_logits(llama: Path) -> None:
    prompt = tiny_models.prompts(2)[1]
    model = tiny_models.reference_model(llama)
    config = configure(
        max_tokens=6, ignore_end_id=True, temperature=2.0, seed=1, log_probs=True, top_log_probs=3
    )
    async with running(llama) as engine:
        (stream,) = await engine.ended(engine.submit(prompt, config))
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + stream.token_ids])).logits[0].double()
    expected = logits.log_softmax(dim=1)[len(prompt) - 1 : -1]
    total = 0.0
    for row, token, details in zip(expected, stream.token_ids, stream.details, strict=True):
        total += float(row[token])
        assert details.log_probs == pytest.approx([float(row[token])], abs=1e-4)
        assert details.cumulative_log_prob == pytest.approx(total, abs=1e-3)
        values, ids = row.topk(3)
        (top,) = details.top_log_probs
        assert top[0] == ids.tolist()
        assert top[1] == pytest.approx(values.tolist(), abs=1e-4)
    assert stream.end is not None
    assert stream.end.cumulative_log_prob == pytest.approx(total, abs=1e-3)


async def test_log_probs_come_only_where_asked_for(llama: Path) -> None:
    prompts = tiny_models.prompts(2)
    async with running(llama) as engine:
        (asking,) = engine.submit(prompts[0], configure(max_tokens=3, log_probs=True))
        (silent,) = engine.submit(prompts[1], configure(max_tokens=3))
        with_details, without = await engine.ended([asking, silent])
        assert len(with_details.details) == len(with_details.token_ids)
        assert with_details.details[0].top_log_probs == []
        assert without.details == []


@pytest.mark.parametrize(
    ("places", "rest", "expected"),
    [
        pytest.param(range(3), [], [7, 8, 9], id="all"),
        pytest.param([2, 0], [], [9, 7], id="some"),
        pytest.param([1, 2, 3], [2], [8, 9, 5], id="as many, one of them computed without graphs"),
        pytest.param(range(5), [3, 4], [7, 8, 9, 5, 5], id="more than graphs computed"),
    ],
)
def test_tokens_of_graphs_beside_other_rows(
    places: Sequence[int], rest: list[int], expected: list[int]
) -> None:
    sequences = [continuation([1, 2], GenerationConfig(), 2) for _ in expected]
    likely = torch.zeros(len(rest), 10)
    likely[:, 5] = 1.0
    others = Chooser(ORDERING).choose([sequences[row] for row in rest], likely) if rest else None
    choice = GraphChoice(sequences, places, torch.tensor([7, 8, 9]), None, rest, others)
    assert choice.read() == {}
    assert choice.token_ids == expected


def test_the_lowest_of_equally_likely_ids_come_first() -> None:
    log_probs = torch.full((6144,), -9.0, dtype=torch.float64)
    log_probs[[5, 900, 3000]], log_probs[7], log_probs[::2] = -1.0, -0.5, -torch.inf
    log_probs[[900, 3000]] = -1.0
    assert most_likely(log_probs, 0) == ([], [])
    assert most_likely(log_probs, 3) == ([7, 5, 900], [-0.5, -1.0, -1.0])
    assert most_likely(log_probs, 6)[0][3:] == [3000, 1, 3]
    log_probs[8:] = -torch.inf
    assert most_likely(log_probs, 9) == ([7, 5, 1, 3], [-0.5, -1.0, -9.0, -9.0])
