"""Draws are uniform and a function of their place alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.engine.backends.torch.sampling.draws import uniforms

WORD = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**32 - 1)


@given(seed=WORD, batch=SMALL, sequence=SMALL, position=SMALL)
def test_a_draw_lies_in_the_half_open_interval(
    seed: int, batch: int, sequence: int, position: int
) -> None:
    (draw,) = uniforms([seed], [batch], [sequence], [position])
    assert 0 <= draw < 1


@given(seed=WORD, batch=SMALL, sequence=SMALL, position=SMALL, others=st.integers(1, 16))
def test_a_draw_does_not_depend_on_its_neighbours(
    seed: int, batch: int, sequence: int, position: int, others: int
) -> None:
    (alone,) = uniforms([seed], [batch], [sequence], [position])
    rest = list(range(others))
    among = uniforms([*rest, seed], [*rest, batch], [*rest, sequence], [*rest, position])
    assert among[-1] == alone


def test_every_coordinate_counts_and_none_stands_for_another() -> None:
    places = [(s, b, n, p) for s in (0, 1, 2) for b in (0, 1, 2) for n in (0, 1, 2) for p in (0, 1)]
    draws = uniforms(*(list(column) for column in zip(*places, strict=True)))
    assert len(set(draws.tolist())) == len(places)


def test_draws_are_spread_evenly_and_do_not_follow_each_other() -> None:
    count = 100_000
    zeros = np.zeros(count, dtype=np.uint64)
    draws = uniforms(zeros + np.uint64(7), zeros, zeros, np.arange(count, dtype=np.uint64))
    histogram, _ = np.histogram(draws, bins=100, range=(0, 1))
    expected = count / 100
    # 99 degrees of freedom: 99.9 % lie below 148.
    assert ((histogram - expected) ** 2 / expected).sum() < 148
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01


def test_the_formula_stays_as_it_is() -> None:
    # Another formula would change the tokens of a stream that migrates between releases.
    draws = uniforms([0, 42, 2**64 - 1], [0, 1, 2], [0, 3, 4], [0, 5, 100])
    assert draws.tolist() == [0.1296456182997474, 0.7467140226343115, 0.7618581288129997]
