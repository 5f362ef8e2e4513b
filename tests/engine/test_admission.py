"""Admission against the limits of a backend, tested without a backend."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recording_backend import INFO
from trtmesh.chassis.errors import (
    InvalidField,
    OutOfBlocks,
    PromptEmpty,
    PromptTooLong,
    QueueFull,
    TokenOutOfVocabulary,
    TrtmeshError,
)
from trtmesh.chassis.vocabulary import BeamSearch, GenerationConfig, KvCache, Sampling, Stopping
from trtmesh.engine.admission import admit, check_queue
from trtmesh.engine.backend import Submission

SMALL = replace(
    INFO, vocabulary_size=50, max_sequence_tokens=64, total_blocks=12, tokens_per_block=4
)


def item(
    prompt: int | list[int], config: GenerationConfig | None = None, emitted: int = 0
) -> Submission:
    tokens = [5] * prompt if isinstance(prompt, int) else prompt
    return Submission((1,), "r", 0, 0, tokens, emitted, config or GenerationConfig())


def tokens(count: int) -> GenerationConfig:
    return GenerationConfig(stopping=Stopping(max_tokens=count))


@pytest.mark.parametrize(
    ("asked", "kind", "field"),
    [
        (item(0), PromptEmpty, ""),
        (item(1, emitted=1), PromptEmpty, ""),
        (item(64), PromptTooLong, "prompt"),
        (item([5, 50]), TokenOutOfVocabulary, "prompt.token_ids"),
        (item([5, -1]), TokenOutOfVocabulary, "prompt.token_ids"),
        (item(40, tokens(10)), OutOfBlocks, ""),
        (
            item(1, GenerationConfig(stopping=Stopping(end_id=50))),
            InvalidField,
            "stopping.end_id",
        ),
        (
            item(1, GenerationConfig(sampling=Sampling(embedding_bias=(0.5,)))),
            InvalidField,
            "sampling.embedding_bias",
        ),
        (
            item(1, GenerationConfig(kv_cache=KvCache(decode_duration_ms=5))),
            InvalidField,
            "kv_cache.decode_duration_ms",
        ),
        (
            item(
                1,
                GenerationConfig(beam_search=BeamSearch(beam_width=2), sampling=Sampling(top_k=5)),
            ),
            InvalidField,
            "sampling.top_k",
        ),
    ],
)
def test_impossible_item_is_refused_by_field(
    asked: Submission, kind: type[TrtmeshError], field: str
) -> None:
    with pytest.raises(kind) as refusal:
        admit(asked, SMALL)
    assert refusal.value.field == field


def test_last_token_needs_no_block() -> None:
    """12 blocks of 4 hold 48 tokens, and the KV of a 49th is never computed."""
    assert admit(item(40, tokens(9)), SMALL).limit == 49
    assert admit(item(40), SMALL).limit == 49


def test_max_tokens_is_cut_at_the_longest_sequence() -> None:
    assert admit(item(40, tokens(100)), replace(SMALL, total_blocks=100)).limit == 64


def test_prompt_beyond_a_step_is_too_long() -> None:
    with pytest.raises(PromptTooLong):
        admit(item(9), replace(SMALL, max_prompt_tokens=8))


def test_queue_holds_batch_and_queue_size() -> None:
    info = replace(SMALL, max_batch_size=2, max_queue_size=3)
    many = replace(item(1), keys=tuple(range(6)))
    with pytest.raises(InvalidField, match="num_return_sequences is 6 but must be at most 5"):
        check_queue(many, info, present=0, running=0)
    check_queue(item(1), info, present=4, running=2)
    with pytest.raises(QueueFull):
        check_queue(item(1), info, present=5, running=2)
