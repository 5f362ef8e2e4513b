"""The formulas of beam search, step by step, over made-up log-probabilities."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trtmesh.chassis import vocabulary
from trtmesh.chassis.stopping import End, StopVocabulary
from trtmesh.engine.backends.torch.beams.search import Beams, Hypothesis
from trtmesh.v1 import generation_pb2 as pb

END = 0
VOCABULARY = 4
LENGTH = 4


class World:
    """Log-probabilities after every possible beginning, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, tokens: list[int]) -> Tensor:
        seed = self._seed
        for token in tokens:
            seed = (seed * 31 + token + 7) % 2**31
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(dim=0)

    def total(self, tokens: tuple[int, ...]) -> float:
        return sum(float(self.row(list(tokens[:at]))[token]) for at, token in enumerate(tokens))

    def search(self, asked: vocabulary.BeamSearch) -> Beams:
        search = Beams(asked, most_tokens=LENGTH, ending_tokens=1)
        while not search.over:
            rows = torch.stack([self.row(beam.tokens) for beam in search.running])
            search.advance(rows, end_after)
        return search


def end_after(beam: Hypothesis, token: int) -> End | None:
    if token == END:
        return pb.FINISH_REASON_END_ID, (END,)
    return (pb.FINISH_REASON_LENGTH, ()) if len(beam.tokens) + 1 == LENGTH else None


def every_sequence() -> list[tuple[int, ...]]:
    whole = product(range(1, VOCABULARY), repeat=LENGTH)
    ended = (
        (*begin, END)
        for length in range(LENGTH)
        for begin in product(range(1, VOCABULARY), repeat=length)
    )
    return [*whole, *ended]


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 1.0, -0.5]))
def test_a_search_as_wide_as_the_world_finds_the_best(seed: int, length_penalty: float) -> None:
    world, count = World(seed), len(every_sequence())
    search = world.search(
        vocabulary.BeamSearch(
            count, length_penalty, pb.EARLY_STOPPING_EXHAUSTIVE, diversity_rate=None
        )
    )
    ranked = sorted(
        every_sequence(), key=lambda each: -world.total(each) / len(each) ** length_penalty
    )
    assert [beam.tokens for beam in search.best()] == [list(tokens) for tokens in reversed(ranked)][
        ::-1
    ]


@given(st.integers(0, 10_000), st.integers(2, 4), st.floats(0, 3))
def test_diversity_favours_later_beams(seed: int, width: int, rate: float) -> None:
    """TensorRT-LLM's rule: candidates are ranked by sum + rate * number of the beam they continue."""
    world = World(seed)
    search = Beams(vocabulary.BeamSearch(width, 1.0, 0, rate), most_tokens=LENGTH, ending_tokens=1)
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    while not search.over:
        candidates = sorted(
            (
                (total + float(value) + rate * number, (*tokens, token), total + float(value))
                for number, (tokens, total) in enumerate(beams)
                for token, value in enumerate(world.row(list(tokens)))
            ),
            key=lambda each: -each[0],
        )
        rows = torch.stack([world.row(beam.tokens) for beam in search.running])
        search.advance(rows, end_after)
        going_on = [each for each in candidates if each[1][-1] != END and len(each[1]) < LENGTH]
        beams = [(tokens, total) for _, tokens, total in going_on[:width]]
        assert [tuple(beam.tokens) for beam in search.running] == [tokens for tokens, _ in beams]
        for beam, (_, total) in zip(search.running, beams, strict=True):
            # The rate changes the rank, not the sum.
            assert beam.total == pytest.approx(total)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "over"),
    [
        (pb.EARLY_STOPPING_UNSPECIFIED, 0.0, True),
        (pb.EARLY_STOPPING_FIRST_COMPLETE, 0.0, True),
        (pb.EARLY_STOPPING_HEURISTIC, 0.0, False),
        (pb.EARLY_STOPPING_HEURISTIC, 1.0, True),
        (pb.EARLY_STOPPING_EXHAUSTIVE, 1.0, False),
        (pb.EARLY_STOPPING_EXHAUSTIVE, -1.0, True),
    ],
)
def test_when_a_search_is_over(early_stopping: int, length_penalty: float, *, over: bool) -> None:
    """Complete beams have sums of -3 after one token; the best running beam has -2.9 after two of at most 4."""
    search = Beams(
        vocabulary.BeamSearch(2, length_penalty, early_stopping), most_tokens=4, ending_tokens=1
    )
    end = (pb.FINISH_REASON_END_ID, (END,))
    if length_penalty == 1.0 and early_stopping == pb.EARLY_STOPPING_HEURISTIC:
        totals, running = (-1.0, -1.2), -2.9
    elif length_penalty == 1.0:
        totals, running = (-0.8, -1.2), -2.9
    else:
        totals, running = (-2.0, -3.0), -2.9
    search.complete = [Hypothesis([END], [total], total, end) for total in totals]
    search.running = [Hypothesis([1, 2], [running / 2] * 2, running)]
    assert search.over is over


def test_extreme_penalties_overflow_nothing() -> None:
    for length_penalty in (-1e6, 1e6):
        search = World(1).search(
            vocabulary.BeamSearch(3, length_penalty, pb.EARLY_STOPPING_EXHAUSTIVE)
        )
        assert len(search.best()) == 3
        assert all(math.isfinite(search.score(beam)) for beam in search.best())


WORDS = {0: b"", 1: b"a", 2: b"b", 3: b"ba"}


def first_ends(text: bytes, stops: list[bytes], held: int) -> list[int]:
    """The first end of each stop text beyond the first `held` bytes."""
    starts = ((text.find(stop, max(0, held - len(stop) + 1)), len(stop)) for stop in stops)
    return [at + size for at, size in starts if at >= 0]


@given(
    st.integers(0, 10_000),
    st.integers(2, 4),
    st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"aab", b"bb"]), min_size=1, max_size=3),
    st.sampled_from([0, 0, 2]),
)
def test_stop_texts_end_beams(seed: int, width: int, stops: list[bytes], least: int) -> None:
    """Few candidates a beam give the search of all candidates; texts are cut nowhere but at the first stop text."""
    world, texts = World(seed), StopVocabulary(stops, WORDS)
    searches = [
        Beams(
            vocabulary.BeamSearch(width),
            most_tokens=LENGTH,
            ending_tokens=most,
            stop_vocabulary=texts,
            min_tokens=least,
        )
        for most in (1, VOCABULARY)
    ]
    for search in searches:
        while not search.over:
            rows = torch.stack([world.row(beam.tokens) for beam in search.running])
            search.advance(rows, end_after)
    few, all_of = ([(beam.tokens, beam.end) for beam in search.best()] for search in searches)
    assert few == all_of
    kept = []
    for tokens, end in few:
        text = b"".join(WORDS[token] for token in tokens)
        before = text.removesuffix(WORDS[tokens[-1]])
        assert end
        held = len(b"".join(WORDS[token] for token in tokens[:least]))
        assert not first_ends(before, stops, held)
        ends = first_ends(text, stops, held)
        assert (end[0] == pb.FINISH_REASON_STOP_WORD) == bool(ends)
        kept.append((tuple(tokens[:-1]), text[: min(ends)] if ends else tokens[-1]))
    assert len(set(kept)) == len(kept), "two beams end alike at a stop text"
