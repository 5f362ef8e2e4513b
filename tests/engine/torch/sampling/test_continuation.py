"""Incremental counts equal counts over all tokens."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from trtmesh.engine.backends.torch.sampling.continuation import Ngrams


def repeating(tokens: list[int], size: int) -> set[int]:
    """Ids that would repeat an n-gram."""
    runs = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    last = tuple(tokens[len(tokens) - size + 1 :])
    return {run[-1] for run in runs if run[:-1] == last and len(last) == size - 1}


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9, 30])
@pytest.mark.parametrize("ids", [2, 5, 40])
def test_repeated_ngrams_are_found_as_the_tokens_grow(size: int, ids: int) -> None:
    dice = Random(size * ids)
    # Ids of a prompt table are large, and 0 is an ordinary id.
    names = [0, *(dice.randrange(2**31) for _ in range(ids - 1))]
    tokens: list[int] = []
    ngrams = Ngrams(size)
    while len(tokens) < 150:
        again = tokens[-40:-20] if dice.random() < 0.1 else []
        tokens += again or [dice.choice(names)]
        ngrams.catch_up(tokens)
        assert set(ngrams.repeating(tokens)) == repeating(tokens, size)


def test_long_ngrams_take_no_more_room_than_short_ones() -> None:
    dice = Random(1)
    tokens = [dice.randrange(300) for _ in range(6000)]
    peaks = []
    for size in (3, 3000):
        tracemalloc.start()
        ngrams = Ngrams(size)
        ngrams.catch_up(tokens)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert ngrams.repeating(tokens) is not None
    assert peaks[1] < 2 * peaks[0]
