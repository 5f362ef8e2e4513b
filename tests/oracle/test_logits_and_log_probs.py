"""Logits and log-probabilities equal those of transformers' model under any schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.torch.harness import Harness, Stream, configure, running
from oracle import tiny_models
from process_constants import patch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.backends.torch.sampling import readers
from trtmesh.v1 import generation_pb2 as pb

NEW_TOKENS = 12
VOCABULARY = tiny_models.VOCABULARY_SIZE
PROMPTS = tiny_models.prompts(5)
TOLERANCE: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}

DTYPES: dict[int, torch.dtype] = {
    pb.DATA_TYPE_FP32: torch.float32,
    pb.DATA_TYPE_FP16: torch.float16,
    pb.DATA_TYPE_BF16: torch.bfloat16,
}

SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_step_tokens": 5, "tokens_per_block": 4},
    # Small enough for sequences to be paused and recomputed.
    {"kv_cache_tokens": 60, "tokens_per_block": 4, "max_step_tokens": 7},
]


reference = cache(tiny_models.reference_model)


def logits_of(llama: Path, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary], float32."""
    model = reference(llama)
    with torch.inference_mode():
        rows: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0]
    return rows


def values(tensor: Tensor | None) -> torch.Tensor:
    assert tensor is not None
    flat = torch.from_numpy(np.frombuffer(tensor.data, dtype=np.uint8).copy())
    return flat.view(DTYPES[tensor.data_type]).view(*tensor.shape)


def check_prompt(llama: Path, prompt: Sequence[int], stream: Stream, top: int) -> None:
    """All positions once and in order, logits and log-probabilities as the model gives them."""
    expected = logits_of(llama, prompt)
    assert [p.token_offset for p in stream.prompts] == sorted(
        {p.token_offset for p in stream.prompts}
    )
    found = torch.cat([values(p.context_logits) for p in stream.prompts])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    log_probs = expected.double().log_softmax(dim=1)
    told = [value for p in stream.prompts for value in p.log_probs]
    following = [float(log_probs[at, token]) for at, token in enumerate(prompt[1:])]
    assert told == pytest.approx(following, abs=1e-3)
    tops = [alternatives for p in stream.prompts for alternatives in p.top_log_probs]
    assert [len(ids) for ids, _ in tops] == [top] * (len(prompt) - 1)
    for row, (ids, likely) in zip(log_probs, tops, strict=False):
        assert ids == row.topk(top).indices.tolist()
        assert likely == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("settings", SETTINGS, ids=["whole", "chunks", "pauses"])
async def test_everything_of_prompts_and_tokens(
    llama: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pieces of three rows.
    monkeypatch.setattr(readers, "PIECE_BYTES", 3 * VOCABULARY * 4)
    everything = configure(
        max_tokens=NEW_TOKENS,
        ignore_end_id=True,
        prompt_log_probs=True,
        context_logits=True,
        generation_logits=True,
        log_probs=True,
        top_log_probs=2,
    )
    async with running(llama, **settings) as engine:
        # The second run could reuse the whole prompt.
        for _ in range(2):
            with engine.gate.held():
                keys = [engine.submit(prompt, everything)[0] for prompt in PROMPTS]
            for prompt, stream in zip(PROMPTS, await engine.ended(keys), strict=True):
                check_prompt(llama, prompt, stream, top=2)
                check_tokens(llama, prompt, stream)
                given = [prompt.context_logits for prompt in stream.prompts]
                assert all(logits is not None and logits.shape[0] <= 3 for logits in given)
        reusing = engine.submit(PROMPTS[1], configure(max_tokens=2))
        (stream,) = await engine.ended(reusing)
        assert stream.prompts == []
        assert stream.end is not None
        if "kv_cache_tokens" in settings:
            assert engine.backend._loaded.engine.scheduler.preemptions > 0
        else:
            assert stream.end.cached_prompt_tokens > 0, "what was read leaves its blocks to others"


def check_tokens(llama: Path, prompt: Sequence[int], stream: Stream) -> None:
    expected = logits_of(llama, [*prompt, *stream.token_ids])[len(prompt) - 1 : -1]
    found = torch.cat([values(details.generation_logits) for details in stream.details])
    torch.testing.assert_close(found, expected, **TOLERANCE)
    log_probs = expected.double().log_softmax(dim=1)[range(NEW_TOKENS), stream.token_ids]
    told = [value for details in stream.details for value in details.log_probs]
    assert told == pytest.approx(log_probs.tolist(), abs=1e-3)
    sums = [details.cumulative_log_prob for details in stream.details]
    assert sums == pytest.approx(log_probs.cumsum(0).tolist(), abs=1e-3)


@pytest.mark.parametrize("data_type", DTYPES)
async def test_logits_come_in_the_type_asked_for_and_as_the_model_gave_them(
    llama: Path, data_type: int
) -> None:
    """Not as bias, penalties and temperature changed them for the choice."""
    prompt = PROMPTS[1]
    config = configure(
        max_tokens=3,
        ignore_end_id=True,
        context_logits=True,
        generation_logits=True,
        logits_data_type=data_type,
        temperature=3.0,
        repetition_penalty=2.0,
        seed=1,
        embedding_bias_token_ids=((5,),),
        embedding_bias_weights=(4.0,),
    )
    async with running(llama) as engine:
        (stream,) = await engine.ended(engine.submit(prompt, config))
    expected = logits_of(llama, [*prompt, *stream.token_ids])
    found = torch.cat(
        [values(p.context_logits) for p in stream.prompts]
        + [values(details.generation_logits) for details in stream.details]
    )
    assert found.dtype == DTYPES[data_type]
    rows = torch.cat([expected[: len(prompt)], expected[len(prompt) - 1 : -1]])
    coarse: dict[str, Any] = (
        {"atol": 5e-2, "rtol": 1e-2} if data_type != pb.DATA_TYPE_FP32 else TOLERANCE
    )
    torch.testing.assert_close(found.float(), rows, **coarse)


async def test_a_prompt_of_one_token_has_no_log_probs(llama: Path) -> None:
    async with running(llama) as engine:
        config = configure(max_tokens=3, ignore_end_id=True, prompt_log_probs=True)
        (stream,) = await engine.ended(engine.submit([7], config))
        assert stream.prompts == []
        assert len(stream.token_ids) == 3


async def test_an_item_tells_of_its_prompt_once(llama: Path) -> None:
    config = configure(
        max_tokens=2, ignore_end_id=True, temperature=1.0, seed=2, num_return_sequences=3,
        prompt_log_probs=True,
    )  # fmt: skip
    async with running(llama) as engine:
        streams = await engine.ended(engine.submit(PROMPTS[1], config))
        told = [[len(p.log_probs) for p in stream.prompts] for stream in streams]
        assert told == [[len(PROMPTS[1]) - 1], [], []]
        # A prompt of one token has no log-probabilities.
        (stream,) = await engine.ended(
            engine.submit([5], configure(max_tokens=2, prompt_log_probs=True))
        )
        assert [p.log_probs for p in stream.prompts] in ([], [[]])


def normalized(tokens: Sequence[int], rows: torch.Tensor) -> list[float]:
    """Log-probabilities among the tokens left by temperature 1.5, top_k 8 and top_p 0.9."""
    found = []
    for token, row in zip(tokens, rows, strict=True):
        scores = row[None].double()
        warpers: list[Any] = [
            TemperatureLogitsWarper(1.5),
            TopKLogitsWarper(8),
            TopPLogitsWarper(0.9),
        ]
        for warper in warpers:
            scores = warper(None, scores)
        found.append(float(scores.log_softmax(dim=1)[0, token]))
    return found


@pytest.mark.parametrize("worker_setting", [False, True])
async def test_normalised_log_probs_are_those_among_the_tokens_that_were_left(
    llama: Path, worker_setting: bool
) -> None:
    prompt = PROMPTS[1]
    shape: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_end_id": True, "log_probs": True}
    sampled = {**shape, "temperature": 1.5, "top_k": 8, "top_p": 0.9, "seed": 4}
    asked = {} if worker_setting else {"normalize_log_probs": True}
    async with running(llama, normalize_log_probs=worker_setting) as engine:
        (stream,) = await engine.ended(
            engine.submit(prompt, configure(**sampled, **asked, top_log_probs=20))
        )
        (greedy,) = await engine.ended(engine.submit(prompt, configure(**shape, **asked)))
        (plain,) = await engine.ended(
            engine.submit(prompt, configure(**sampled, normalize_log_probs=False))
        )
    rows = logits_of(llama, [*prompt, *stream.token_ids])[len(prompt) - 1 : -1]
    expected = normalized(stream.token_ids, rows)
    assert [d.log_probs[0] for d in stream.details] == pytest.approx(expected, abs=1e-3)
    for details in stream.details:
        ((ids, likely),) = details.top_log_probs
        assert 1 <= len(ids) == len(likely) <= 8
        assert sum(map(math.exp, likely)) == pytest.approx(1.0)
    assert [d.log_probs for d in greedy.details] == [[0.0]] * NEW_TOKENS
    for each in (stream, greedy):
        terms = model_log_probs(llama, prompt, each.token_ids)
        assert [d.model_log_probs[0] for d in each.details] == pytest.approx(terms, abs=1e-3)
        assert each.end is not None
        assert each.end.cumulative_log_prob == pytest.approx(sum(terms), abs=1e-2)
        assert [d.cumulative_log_prob for d in each.details] == pytest.approx(
            list(accumulate(terms)), abs=1e-2
        )
    assert plain.token_ids == stream.token_ids
    raw = model_log_probs(llama, prompt, plain.token_ids)
    assert [d.log_probs[0] for d in plain.details] == pytest.approx(raw, abs=1e-3)
    assert not any(d.model_log_probs for d in plain.details)


def model_log_probs(llama: Path, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
    rows = logits_of(llama, [*prompt, *ids])[len(prompt) - 1 : -1].double().log_softmax(dim=1)
    return [float(row[token]) for row, token in zip(rows, ids, strict=True)]


@pytest.mark.parametrize("normalize", [False, True])
async def test_a_sum_goes_on_where_the_sequence_began_elsewhere(
    llama: Path, normalize: bool
) -> None:
    prompt = PROMPTS[1]
    config = configure(
        max_tokens=NEW_TOKENS, ignore_end_id=True, log_probs=True, temperature=1.5, seed=6,
        top_p=0.9, top_p_decay=0.8, no_repeat_ngram_size=2, normalize_log_probs=normalize,
        prompt_log_probs=True,
    )  # fmt: skip
    async with running(llama, tokens_per_block=4) as engine:
        (whole,) = await engine.ended(engine.submit(prompt, config))
        for cut in (1, 5, NEW_TOKENS - 1):
            (rest,) = await engine.ended(
                engine.submit(prompt, config, emitted=whole.token_ids[:cut])
            )
            assert rest.token_ids == whole.token_ids[cut:]
            assert [d.cumulative_log_prob for d in rest.details] == pytest.approx(
                [d.cumulative_log_prob for d in whole.details[cut:]], abs=1e-4
            )
            assert rest.prompts == [], "it was told where the sequence began"
            assert rest.end is not None
            assert rest.end.cached_prompt_tokens > 0, "the prompt itself may be reused"


async def test_what_asks_for_too_many_logits_is_refused_before_anything_is_computed(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = VOCABULARY * 4
    patch(monkeypatch, max_logits_bytes=10 * row)
    async with running(llama) as engine:
        fits = configure(max_tokens=10, generation_logits=True, context_logits=True)
        engine.submit([5] * 10, fits)
        half = configure(max_tokens=20, generation_logits=True, logits_data_type=pb.DATA_TYPE_BF16)
        engine.submit([5] * 10, half)
        for prompt, config, name in [
            ([5] * 11, configure(max_tokens=1, context_logits=True), "output.context_logits"),
            ([5], configure(max_tokens=11, generation_logits=True), "output.generation_logits"),
            ([5], configure(generation_logits=True), "ask for fewer tokens"),
            (
                [5],
                configure(max_tokens=6, generation_logits=True, num_return_sequences=2),
                "output.generation_logits",
            ),
        ]:
            with pytest.raises(InvalidField, match=name):
                engine.submit(prompt, config)
        await engine.ended()


async def test_a_reader_that_fails_fails_its_item_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("unreadable")

    async with running(llama) as engine:
        monkeypatch.setattr(readers, "to_message", failing)
        (bad,) = engine.submit(PROMPTS[1], configure(max_tokens=4, context_logits=True))
        (good,) = engine.submit(PROMPTS[2], configure(max_tokens=4, ignore_end_id=True))
        streams = await engine.ended([bad, good])
        check_failed(streams[0])
        assert len(streams[1].token_ids) == 4
        assert_idle(engine)


def check_failed(stream: Stream) -> None:
    assert stream.end is not None
    assert stream.end.reason == pb.FINISH_REASON_ERROR
    assert "unreadable" in str(stream.end.error)
    assert stream.token_ids == []


def assert_idle(engine: Harness) -> None:
    assert engine.backend.stats().used_blocks == 0
