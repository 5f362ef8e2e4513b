"""Draws are the largest sums of logits and noise, and the noise is a function of its place alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from engine.torch.choosing import chosen, continuation, filtered_weights
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from trtmesh.chassis.vocabulary import GenerationConfig, Sampling
from trtmesh.engine.backends.torch.accelerator import ORDERING as DEVICE_ORDERING
from trtmesh.engine.backends.torch.sampling import draws, filters
from trtmesh.engine.backends.torch.sampling.choice import Chooser, adjusted
from trtmesh.engine.backends.torch.sampling.continuation import Continuation
from trtmesh.engine.backends.torch.sampling.draws import BLOCK, places

WORD = st.integers(0, 2**64 - 1)
SMALL = st.integers(0, 2**32 - 1)

SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 100.0, "top_p": 0.9},
    {"top_k": 2},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 50, "temperature": 2.0, "min_p": 0.02},
    {"top_k": 7, "top_p": 0.5, "min_p": 0.3, "temperature": 0.7},
    {"top_p": 0.8},
    {"min_p": 0.05},
]


@pytest.fixture(autouse=True, scope="module")
def known_streams() -> Iterator[None]:
    """Computes the 8,000 streams of the tests once, with room for all."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(draws, "stream_of", cache(draws.stream_of.__wrapped__))
        yield


def sampling(**values: Any) -> Sampling:
    return Sampling(**{"temperature": 1.0, "seed": 3, **values})


def rows_of(
    count: int, shapes: Sequence[dict[str, Any]], tokens: Sequence[int] = (0,)
) -> list[Continuation]:
    """The batch indexes 0, 1, 2, ... with the shapes in turn."""
    configs = [GenerationConfig(sampling=sampling(**shape)) for shape in shapes]
    rows = [continuation(tokens, configs[row % len(configs)], 1) for row in range(count)]
    for batch_index, row in enumerate(rows):
        row.batch_index = batch_index
    return rows


def logits_with_ties(rows: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(rows, size, generator=generator) * 3
    logits[::2] = (logits[::2] * 2).round() / 2
    logits[::5, : size - 20] = -torch.inf
    return logits


def noise(place: int, tokens: Sequence[int]) -> NDArray[np.float64]:
    """The noise of some tokens at a place."""
    (row,) = noise_at(np.array([place]), tokens)
    return np.asarray(row)


def noise_at(places: NDArray[np.int64], tokens: Sequence[int]) -> NDArray[np.float64]:
    """The noise of some tokens at each place, as the module's page has it: [places, tokens]"""
    ids = np.array(tokens, dtype=np.uint64)
    at = places.view(np.uint64)[:, None]
    blocks = hashed(at, ids // np.uint64(BLOCK) + np.uint64(2**32))
    first = ids % np.uint64(BLOCK) == blocks % np.uint64(BLOCK)
    waits = exponential(blocks) / BLOCK + np.where(first, 0.0, exponential(hashed(at, ids)))
    result: NDArray[np.float64] = -np.log(waits)
    return result


def hashed(place: NDArray[np.uint64], words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (place ^ words) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def exponential(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    result: NDArray[np.float64] = -np.log(uniform)
    return result


def noise_of(sequences: list[Continuation], size: int) -> Tensor:
    """[sequences, size]"""
    seeds = [each.token_rules.sampling.seed or 0 for each in sequences]
    batch_indexes = [each.batch_index for each in sequences]
    found = places(seeds, batch_indexes, [0] * len(seeds), [len(each.tokens) for each in sequences])
    return torch.from_numpy(noise_at(found, range(size)))


# Also with a vocabulary that is no multiple of a block, or smaller.
@pytest.mark.parametrize("size", [300, 320, 20])
def test_a_draw_is_the_token_with_the_largest_sum(size: int) -> None:
    logits = logits_with_ties(400, size)
    rows = rows_of(400, SHAPES)
    configs = [row.token_rules.sampling for row in rows]
    weights = filtered_weights(configs, logits).log()
    assert chosen(rows, logits) == (weights + noise_of(rows, size)).argmax(dim=1).tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_draw_among_few_likely_tokens_is_the_largest_sum(shape: dict[str, Any]) -> None:
    logits = logits_with_ties(6, 40_000)
    rows = rows_of(6, [shape])
    weights = filtered_weights([row.token_rules.sampling for row in rows], logits).log()
    assert chosen(rows, logits) == (weights + noise_of(rows, 40_000)).argmax(dim=1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e3])
def test_sums_of_any_size_are_compared_exactly(temperature: float) -> None:
    logits = 1e6 + logits_with_ties(100, 320)
    rows = rows_of(100, [{"temperature": temperature}])
    sums = logits.double() / temperature + noise_of(rows, 320)
    assert chosen(rows, logits) == sums.argmax(dim=1).tolist()


def test_a_device_that_is_not_waited_for_draws_the_same() -> None:
    logits = logits_with_ties(400, 300)
    rows = rows_of(400, SHAPES)
    choice = Chooser(DEVICE_ORDERING).choose(rows, logits)
    assert choice.read() == {}
    assert choice.token_ids == chosen(rows, logits)


def test_a_draw_does_not_depend_on_the_other_rows() -> None:
    logits = logits_with_ties(100, 300)
    rows = rows_of(100, SHAPES)
    alone = [chosen([row], logits[at : at + 1])[0] for at, row in enumerate(rows)]
    assert chosen(rows, logits) == alone


def test_top_k_bounds_the_same_tokens_however_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_with_ties(400, 300)
    rows = rows_of(400, SHAPES)
    few = chosen(rows, logits)
    monkeypatch.setattr(filters, "FEW", 0)
    assert chosen(rows, logits) == few


def chi_square(counts: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def most_by_chance(degrees: int) -> float:
    """Exceeded by one chi-square in 10,000 (Wilson and Hilferty)."""
    share = 2 / (9 * degrees)
    return float(degrees * (1 - share + 3.72 * share**0.5) ** 3)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 3.0},
        {"top_k": 10},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
)
def test_draws_follow_the_distribution(values: dict[str, Any]) -> None:
    draws, size = 8000, 100
    generator = torch.Generator().manual_seed(4)
    one = torch.randn(1, size, generator=generator) * 1.5
    rows = rows_of(draws, [values], [0, 1, 1, 7, 50])
    rows[0].remember()
    config = rows[0].token_rules.sampling
    weights = filtered_weights([config], adjusted(rows[:1], one))[0]
    expected = (weights / weights.sum() * draws).numpy()
    counts = np.bincount(chosen(rows, one.expand(draws, -1)), minlength=size)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(expected))
    # Rare tokens together, for a chi-square needs some of each.
    rare = expected < 10
    counts = np.append(counts[~rare], counts[rare].sum() + 10)
    expected = np.append(expected[~rare], expected[rare].sum() + 10)
    assert chi_square(counts, expected) < most_by_chance(len(expected) - 1)


def noise_at_positions(count: int, tokens: int) -> NDArray[np.float64]:
    """[positions, tokens]"""
    fives = np.full(count, 5, dtype=np.uint64)
    found = places(fives, fives, fives, np.arange(count, dtype=np.uint64))
    return noise_at(found, range(tokens))


def test_noise_is_gumbels() -> None:
    values = noise_at_positions(200, 1000)
    uniform = np.exp(-np.exp(-values))
    counts, _ = np.histogram(uniform, bins=100, range=(0, 1))
    assert chi_square(counts, np.full(100, values.size / 100)) < most_by_chance(99)


def test_noise_of_the_tokens_of_a_block_is_independent() -> None:
    uniform = np.exp(-np.exp(-noise_at_positions(20_000, 2 * BLOCK)))
    correlations = np.corrcoef(uniform, rowvar=False)[np.triu_indices(2 * BLOCK, 1)]
    # Standard deviation 0.007.
    assert np.abs(correlations).max() < 0.035
    # Any of them is equally likely the largest.
    counts = np.bincount(uniform[:, :BLOCK].argmax(axis=1), minlength=BLOCK)
    assert chi_square(counts, np.full(BLOCK, len(uniform) / BLOCK)) < most_by_chance(BLOCK - 1)


@pytest.mark.parametrize("column", range(4))
def test_streams_next_to_each_other_are_independent(column: int) -> None:
    """Neighbours by seed, batch index, sequence index and position."""
    size, count = 8, 5000
    words = [np.full(count + 1, 5, dtype=np.uint64) for _ in range(4)]
    words[column] = np.arange(count + 1, dtype=np.uint64)
    tokens = noise_at(places(*words), range(size)).argmax(axis=1)
    pairs = np.bincount(tokens[:-1] * size + tokens[1:], minlength=size**2)
    # Pairs of a stream and its neighbour are not independent of each other, but nearly.
    assert chi_square(pairs, np.full(size**2, count / size**2)) < most_by_chance(size**2 - 1)


@given(seed=WORD, batch=SMALL, sequence=SMALL, position=SMALL, others=st.integers(1, 16))
def test_a_place_does_not_depend_on_its_neighbours(
    seed: int, batch: int, sequence: int, position: int, others: int
) -> None:
    (alone,) = places([seed], [batch], [sequence], [position])
    rest = list(range(others))
    among = places([*rest, seed], [*rest, batch], [*rest, sequence], [*rest, position])
    assert among[-1] == alone


@given(place=st.integers(-(2**63), 2**63 - 1), token=SMALL)
def test_noise_is_finite_and_bounded(place: int, token: int) -> None:
    (value,) = noise(place, [token])
    # -ln(36.8 / BLOCK + 36.8) and -ln(2**-53 / BLOCK)
    assert -3.7 < value < 40.3


def test_every_coordinate_counts_and_none_stands_for_another() -> None:
    words = list(product((0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1)))
    found = places(*(list(column) for column in zip(*words, strict=True)))
    assert len(set(found.tolist())) == len(words)


def test_the_formula_stays_as_it_is() -> None:
    # Another formula would change the tokens of a stream that migrates between releases.
    found = places([0, 42, 2**64 - 1], [0, 1, 2], [0, 3, 4], [0, 5, 100]).tolist()
    assert found == [2391539541053276776, -4672301601924243584, -4392942151020899332]
    assert noise(found[1], [0, 1, 32, 128_255]).tolist() == pytest.approx(
        [0.06100840458734586, -0.6216977363001834, 0.6236596338084189, 0.3827293375182251]
    )


def test_errors_of_rounding_rarely_change_a_draw() -> None:
    """Inverting the cumulative distribution instead changes 49, 15 and 10 of these draws."""
    draws, size, error = 2000, 1000, 1e-3
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(draws, size, generator=generator) * 3
    noisy = logits + error * torch.randn(draws, size, generator=generator)
    for shape in ({}, {"top_p": 0.9}, {"min_p": 0.02}):
        rows = rows_of(draws, [shape])
        exact, rounded = (np.array(chosen(rows, each)) for each in (logits, noisy))
        assert (exact != rounded).sum() <= 3 * draws * error
