"""Beam search against transformers: tokens and scores, alone and among companions, whole and paused."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.torch.conftest import ModelDir
from engine.torch.harness import Harness, Stream, configure, running
from oracle import tiny_models
from oracle.beams import STOPPING, TOKENS, Beams, expected
from process_constants import patch
from transformers import PreTrainedModel
from trtmesh.chassis.errors import InvalidField, OutOfBlocks, TrtmeshError
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.backends.torch.beams.decoding import BeamDecoding
from trtmesh.engine.backends.torch.beams.search import Extras
from trtmesh.engine.backends.torch.sampling.token_rules import TokenRules
from trtmesh.engine.backends.torch.sequence import Sequence
from trtmesh.v1 import generation_pb2 as pb


def found(streams: SequenceOf[Stream], length_penalty: float = 0.0) -> Beams:
    beams = []
    for stream in streams:
        assert stream.end
        assert stream.end.cumulative_log_prob is not None
        log_probs = [value for details in stream.details for value in details.log_probs]
        assert len(log_probs) == len(stream.token_ids) == stream.end.generated_tokens
        assert sum(log_probs) == pytest.approx(stream.end.cumulative_log_prob)
        score = stream.end.cumulative_log_prob / len(stream.token_ids) ** length_penalty
        beams.append((stream.token_ids, score))
    return beams


def same(mine: Beams, theirs: Beams) -> None:
    assert [tokens for tokens, _ in mine] == [tokens for tokens, _ in theirs]
    assert [score for _, score in mine] == pytest.approx([s for _, s in theirs], abs=1e-3)


def often(model: PreTrainedModel, prompt: SequenceOf[int]) -> list[int]:
    """Frequent ids of beams, declared end ids."""
    beams = expected(model, prompt, 4)
    return [beams[1][0][2], beams[0][0][5]]


@pytest.mark.parametrize("early_stopping", STOPPING)
async def test_beams_equal_generate_in_tokens_and_scores(early_stopping: int, llama: Path) -> None:
    """Early, late and missing ends, and penalties of every sign, in one batch."""
    model = tiny_models.reference_model(llama)
    prompts = tiny_models.prompts(3)
    ends = [[prompts[0][-1]], often(model, prompts[1]), often(model, prompts[2])]
    async with running(llama, tokens_per_block=4, max_step_tokens=16) as engine:
        submitted = []
        for prompt, end_ids, width, length_penalty in (
            (prompts[0], ends[0], 2, 0.0),
            (prompts[1], ends[1], 4, 1.0),
            (prompts[2], ends[2], 5, 2.5),
        ):
            rule: dict[str, Any] = {
                "early_stopping": early_stopping,
                "length_penalty": length_penalty,
            }
            stop = tuple((end_id,) for end_id in end_ids)
            config = beams(width, ignore_end_id=True, stop_token_ids=stop, **rule)
            theirs = expected(model, prompt, width, end_id=end_ids, **rule)
            submitted.append((engine.submit(prompt, config), theirs, length_penalty))
        for keys, theirs, length_penalty in submitted:
            same(found(await engine.ended(keys), length_penalty), theirs)


def beams(width: int, **values: Any) -> GenerationConfig:
    return configure(**{"max_tokens": TOKENS, "log_probs": True, "beam_width": width, **values})


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_beams_equal_generate_in_a_mixed_batch(family: str, model_dir: ModelDir) -> None:
    """In small steps, beside other kinds of items; one search was stopped before."""
    model = tiny_models.reference_model(model_dir(family))
    prompts = tiny_models.prompts(4)
    sampled = configure(max_tokens=20, ignore_end_id=True, temperature=1.0, seed=5)
    async with running(model_dir(family), tokens_per_block=4, max_step_tokens=9) as engine:
        (alone,) = await engine.run([prompts[0]], sampled)
        first = len(engine.streams)
        with engine.held_at(lambda output: first in output.keys):
            gone = engine.submit(prompts[1], beams(4, ignore_end_id=True, max_tokens=400))
            keys = [engine.submit(prompt, beams(3, ignore_end_id=True)) for prompt in prompts[1:]]
            mate = engine.submit(prompts[0], sampled)
            await engine.until(lambda: engine.streams[gone[0]].token_ids)
            engine.backend.stop([gone[2]], pb.FINISH_REASON_STOPPED)
        for prompt, each in zip(prompts[1:], keys, strict=True):
            same(found(await engine.ended(each)), expected(model, prompt, 3))
        assert (await engine.ended(mate))[0].token_ids == alone
        for stream in await engine.ended(gone):
            assert stream.end
            assert stream.end.reason == pb.FINISH_REASON_STOPPED
            assert stream.end.generated_tokens == len(stream.token_ids)
        assert engine.backend.stats().used_blocks == 0


@pytest.mark.parametrize("reuse", [True, False])
async def test_paused_beam_search_gives_the_same_beams(reuse: bool, llama: Path) -> None:
    """The pool holds exactly one search, so all running searches are paused and recomputed."""
    model = tiny_models.reference_model(llama)
    prompts = tiny_models.prompts(5)[1:]
    config = beams(4, ignore_end_id=True, max_tokens=20)
    long = configure(max_tokens=30, ignore_end_id=True)
    mate = tiny_models.greedy(model, prompts[0], 30)
    settings: dict[str, Any] = {"kv_cache_tokens": 120, "tokens_per_block": 4}
    async with running(llama, **settings, prefix_reuse=reuse, max_step_tokens=24) as engine:
        keys, mates = [], []
        with engine.gate.held():
            for prompt in prompts:
                keys.append(engine.submit(prompt, config))
                mates.append(engine.submit(prompts[0], long))
        for prompt, each in zip(prompts, keys, strict=True):
            same(found(await engine.ended(each)), expected(model, prompt, 4, tokens=20))
        for key in mates:
            assert (await engine.ended(key))[0].token_ids == mate
        assert engine.backend._loaded.engine.scheduler.preemptions
        assert engine.backend.stats().used_blocks == 0


def _lane(key: int, config: GenerationConfig) -> Sequence:
    rule = EndRule(config.stopping, (), 2, 20)
    rules = TokenRules(config)
    return Sequence(
        key=key,
        batch_index=0,
        sequence_index=0,
        tokens=[5, 6],
        rule=rule,
        token_rules=rules,
        config=config,
        submitted_tokens=2,
    )


def test_row_of_outdated_tokens_is_not_used() -> None:
    config = beams(2)
    lanes = [_lane(n, config) for n in range(2)]
    item = BeamDecoding([0, 1], lanes)
    row, nothing = torch.zeros(8).log_softmax(dim=0), Extras(([], []))
    for lane in lanes:
        lane.slot, lane.num_computed = 1, 2
    assert not item.take(lanes[0], row, nothing)
    # The lane is paused and starts again with one more token.
    lanes[0].tokens.append(7)
    lanes[0].num_computed = 3
    assert not item.take(lanes[1], row, nothing)
    assert item.take(lanes[0], row, nothing)


def test_waiting_row_keeps_no_other_row_in_memory() -> None:
    config = beams(2)
    lanes = [_lane(n, config) for n in range(2)]
    item = BeamDecoding([0, 1], lanes)
    lanes[0].slot, lanes[0].num_computed = 1, 2
    assert not item.take(lanes[0], torch.zeros(50, 8).log_softmax(dim=1)[3], Extras(([], [])))
    assert item._rows[0].log_probs.untyped_storage().nbytes() == 8 * 4


async def test_fewer_sequences_come_back_than_beams(llama: Path) -> None:
    model, prompt = tiny_models.reference_model(llama), tiny_models.prompts(2)[1]
    theirs = expected(model, prompt, 4)
    async with running(llama) as engine:
        for count in (1, 3):
            keys = engine.submit(prompt, beams(4, ignore_end_id=True, num_return_sequences=count))
            assert len(keys) == count
            same(found(await engine.ended(keys)), theirs[:count])


async def test_top_log_probs_belong_to_the_beam_tokens(llama: Path) -> None:
    model, prompt = tiny_models.reference_model(llama), tiny_models.prompts(2)[1]
    async with running(llama) as engine:
        keys = engine.submit(prompt, beams(3, ignore_end_id=True, top_log_probs=2))
        for stream in await engine.ended(keys):
            ids = torch.tensor([[*prompt, *stream.token_ids]])
            with torch.inference_mode():
                logits = model(ids).logits[0, len(prompt) - 1 : -1]
            values, tokens = logits.double().log_softmax(dim=-1).topk(2)
            tops = [top for details in stream.details for top in details.top_log_probs]
            assert [ids for ids, _ in tops] == tokens.tolist()
            for (_, log_probs), row in zip(tops, values.tolist(), strict=True):
                assert log_probs == pytest.approx(row, abs=1e-3)


def logits_of(stream: Stream) -> torch.Tensor:
    """[tokens, vocabulary]"""
    tensors = [d.generation_logits for d in stream.details if d.generation_logits]
    return torch.cat([torch.frombuffer(bytearray(t.data), dtype=torch.float32).view(t.shape)
                      for t in tensors])  # fmt: skip


async def test_beam_logits_belong_to_the_tokens_and_come_once(llama: Path) -> None:
    """Each beam gets the model's own log-probabilities, whatever ranks the beams, even if beams change places."""
    model, prompt = tiny_models.reference_model(llama), tiny_models.prompts(2)[1]
    asked: dict[str, Any] = {"generation_logits": True, "repetition_penalty": 1.3, "end_id": 5}
    async with running(llama) as engine:
        plain = await engine.ended(
            engine.submit(prompt, beams(3, **asked | {"generation_logits": False}))
        )
        for log_probs in (True, False):
            keys = engine.submit(prompt, beams(3, **asked | {"log_probs": log_probs}))
            streams = await engine.ended(keys)
            assert [s.token_ids for s in streams] == [s.token_ids for s in plain]
            assert sum(bool(set(keys) & set(output.keys)) for output in engine.outputs) == 1
            for stream in streams:
                ids = torch.tensor([[*prompt, *stream.token_ids]])
                with torch.inference_mode():
                    theirs = model(ids).logits[0, len(prompt) - 1 : -1]
                assert torch.allclose(logits_of(stream), theirs, atol=1e-3)
                (details,) = stream.details
                assert len(details.log_probs) == (len(stream.token_ids) if log_probs else 0)


async def test_stopped_beam_search_with_logits_delivers_its_beams(llama: Path) -> None:
    prompt = tiny_models.prompts(2)[1]
    config = beams(2, ignore_end_id=True, max_tokens=400, generation_logits=True)
    async with running(llama) as engine:
        with engine.gate.held():
            early = engine.submit(prompt, config)
            engine.backend.stop(early, pb.FINISH_REASON_STOPPED)
        assert not any(stream.token_ids for stream in await engine.ended(early))
        steps, outputs = len(engine.outputs), count(1)
        with engine.held_at(lambda _: next(outputs) == 9):
            late = engine.submit(prompt, config)
            await engine.until(lambda: len(engine.outputs) > steps + 8)
            engine.backend.stop(late, pb.FINISH_REASON_STOPPED)
        for stream in await engine.ended(late):
            assert stream.end
            assert stream.end.reason == pb.FINISH_REASON_STOPPED
            assert stream.end.generated_tokens == len(stream.token_ids) > 0
            assert len(logits_of(stream)) == len(stream.token_ids)


async def test_beams_are_ranked_by_adjusted_logits(llama: Path) -> None:
    """Width 1 of a search is greedy, so beams under rules hold against the scores of the same rules token by token."""
    prompt = tiny_models.prompts(2)[1]
    rules: dict[str, Any] = {
        "repetition_penalty": 1.4,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 2,
        "bad_token_ids": ((7,), (8, 9)),
        "min_tokens": 4,
        "temperature": 0.7,
    }
    async with running(llama) as engine:
        keys = engine.submit(prompt, beams(3, **rules, end_id=5))
        streams = await engine.ended(keys)
        scores = [stream.end.cumulative_log_prob or 0.0 for stream in streams if stream.end]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(stream.token_ids) for stream in streams}) == 3
        for stream in streams:
            await follows(engine, prompt, stream, rules)


async def follows(
    engine: Harness, prompt: SequenceOf[int], stream: Stream, rules: dict[str, Any]
) -> None:
    """Whether each log-probability equals a draw's under the same rules after the same tokens."""
    log_probs = [value for details in stream.details for value in details.log_probs]
    tokens = stream.token_ids
    for at, value in enumerate(log_probs):
        config = configure(
            max_tokens=at + 1, end_id=5, top_log_probs=256, normalize_log_probs=True, **rules
        )
        (one,) = await engine.ended(engine.submit(prompt, config, emitted=tokens[:at]))
        top = dict(zip(*one.details[0].top_log_probs[0], strict=True))
        assert top[tokens[at]] == pytest.approx(value, abs=1e-3)


async def test_beam_search_with_too_few_sequences_blames_the_bans(llama: Path) -> None:
    """All but three ids are forbidden: nine sequences of two tokens exist."""
    bias = tuple(0.0 if token in (5, 6, 7) else -math.inf for token in range(320))
    async with running(llama) as engine:
        for width, possible in ((4, 3), (9, 9), (10, 9)):
            keys = engine.submit([9], beams(width, max_tokens=2, embedding_bias=bias))
            streams = await engine.ended(keys)
            good = [stream for stream in streams if stream.end and not stream.end.error]
            assert len(good) == (possible if width != 4 else 4)
            assert len({tuple(stream.token_ids) for stream in good}) == len(good)
            for stream in streams[len(good) :]:
                assert stream.end
                assert stream.end.error
                assert "only 9 sequences" in stream.end.error.problem


REFUSALS: list[tuple[dict[str, Any], type[TrtmeshError], str]] = [
    ({"top_k": 5}, InvalidField, r"sampling\.top_k is 5"),
    ({"top_p": 0.5}, InvalidField, r"sampling\.top_p is 0\.5"),
    ({"min_p": 0.5}, InvalidField, r"sampling\.min_p"),
    (
        {"max_tokens": 60, "generation_logits": True},
        InvalidField,
        "of 240 tokens .* must take at most 40000",
    ),
    ({"normalize_log_probs": False}, InvalidField, r"output\.normalize_log_probs"),
    ({"width": 17}, InvalidField, r"beam_width is 17 .* 16"),
    ({"max_tokens": 200}, OutOfBlocks, "in each of 4 beams needs [0-9]+ KV blocks"),
]


@pytest.mark.parametrize(("values", "kind", "words"), REFUSALS)
async def test_fields_without_meaning_for_beams_are_refused(
    values: dict[str, Any],
    kind: type[TrtmeshError],
    words: str,
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(monkeypatch, max_logits_bytes=40_000)
    async with running(llama, kv_cache_tokens=512) as engine:
        with pytest.raises(kind, match=words):
            engine.submit([5], beams(**{"width": 4, **values}))
        harmless = {"top_k": 1, "top_p": 0.0, "temperature": 1.0}
        await engine.ended(engine.submit([5], beams(4, **harmless)))
