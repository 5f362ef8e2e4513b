"""The tokens of a simulated model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trtmesh.chassis.vocabulary import Sampling
from trtmesh.engine.backends.simulated.tokens import CHUNK, TokenSource, stream_key


def test_ids_stay_in_their_range() -> None:
    tokens = TokenSource(10, 12, 2, 0.0).chunk(b"key", 0)
    assert len(tokens) == CHUNK
    assert set(tokens) == {10, 11, 12}


def test_end_ids_come_at_their_rate() -> None:
    source = TokenSource(10, 12, 2, 0.25)
    tokens = [token for index in range(64) for token in source.chunk(b"key", index)]
    assert 0.2 < tokens.count(2) / len(tokens) < 0.3


def test_tokens_are_the_same_on_every_machine() -> None:
    assert TokenSource(32, 126, 2, 0.0).chunk(b"key", 3)[:5] == [121, 90, 91, 98, 99]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"temperature": 0.5},
        {"top_k": 7},
        {"top_p": 0.5},
        {"min_p": 0.5},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
    ],
)
def test_sampling_fields_change_a_sampled_stream(change: dict[str, Any]) -> None:
    sampling = Sampling(temperature=1.0, seed=1)
    changed = replace(sampling, **change)
    assert stream_key([1], sampling, 0, 0) != stream_key([1], changed, 0, 0)


def test_places_change_a_sampled_stream_alone() -> None:
    sampled, greedy = Sampling(temperature=1.0, seed=1), Sampling(seed=1)
    assert stream_key([1], sampled, 0, 0) != stream_key([1], sampled, 0, 1)
    assert stream_key([1], sampled, 0, 0) != stream_key([1], sampled, 1, 0)
    assert stream_key([1], greedy, 0, 0) == stream_key([1], greedy, 1, 1)
    assert stream_key([1], greedy, 0, 0) == stream_key([1], replace(greedy, seed=2), 0, 0)
    assert stream_key([1], greedy, 0, 0) != stream_key([2], greedy, 0, 0)
