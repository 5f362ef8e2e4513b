"""Intervals of confidence by bootstrap: requests are drawn again with replacement, many times, by a fixed seed.

Answers of one request stay together, and so do the gaps of one answer: drawing single gaps would make a run look more
certain than it is. What all requests of a run share, such as a busy machine, no such drawing shows; repeat the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trtmesh.tools.bench.pools import Pool, Values
from trtmesh.tools.bench.record import Answer

ROUNDS = 2000
LEAST_ROUNDS = 500
MOST_LOOKS = 20_000_000
"""Values that all rounds look at together; of many values fewer rounds say as much."""
SEED = 20260101
LEVEL = 0.95

BLOCK_VALUES = 1 << 20
"""Values looked at together."""

STATISTICS: Sequence[str] = ("avg", "p50", "p90", "p99")
PERCENTS_OF_STATISTICS = np.array([50.0, 90.0, 99.0])

LEAST_BEYOND = 10
"""Answers with a value beyond a percentile below which its interval says nothing; for a mean, beyond the median."""

Weights = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    high: float

    def includes(self, value: float) -> bool:
        return self.low <= value <= self.high


def interval(samples: Values, level: float = LEVEL) -> Interval | None:
    """The middle part of the samples; None if some round had no value."""
    if not samples.size or not np.isfinite(samples).all():
        return None
    low, high = np.quantile(samples, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def draws(
    requests: Sequence[object], rounds: int = ROUNDS, block: int = ROUNDS
) -> Iterator[Weights]:
    """How often each answer was drawn, [rounds, answers], in blocks of rounds. `requests` has the request of each;
    answers of one request are drawn together."""
    number: dict[object, int] = {}
    of_answer = np.array([number.setdefault(each, len(number)) for each in requests], dtype=np.intp)
    random, count = np.random.default_rng(SEED), len(number)
    for start in range(0, rounds, block):
        own = min(block, rounds - start)
        drawn = random.integers(0, count, (own, count)) + count * np.arange(own)[:, None]
        times = np.bincount(drawn.ravel(), minlength=own * count)
        yield times.reshape(own, count)[:, of_answer]


def bootstrap(
    requests: Sequence[object], figure: Callable[[Weights], Values], values: int
) -> Values:
    """The figure in each round, [rounds, parts of the figure]. `values` is how many a round of it looks at."""
    looks = max(values, len(requests), 1)
    rounds = min(ROUNDS, max(LEAST_ROUNDS, MOST_LOOKS // looks))
    block = max(1, BLOCK_VALUES // looks)
    with np.errstate(all="ignore"):
        return np.concatenate([figure(weights) for weights in draws(requests, rounds, block)])


def intervals_of(pool: Pool, answers: Sequence[Answer]) -> Mapping[str, Interval]:
    """By statistic, of those that so many values tell."""
    told = [statistic for statistic in STATISTICS if is_enough(pool, statistic)]
    if not told:
        return {}
    requests = [answer.request_id for answer in answers]
    rounds = bootstrap(
        requests, lambda weights: weighted_statistics(pool, weights), pool.values.size
    )
    found = {each: interval(rounds[:, STATISTICS.index(each)]) for each in told}
    return {statistic: own for statistic, own in found.items() if own}


def weighted_statistics(pool: Pool, weights: Weights) -> Values:
    """STATISTICS of the values, each as often as its answer was drawn, [rounds, statistics]; NaN without values."""
    rounds, size = len(weights), pool.values.size
    if not size:
        return np.full((rounds, len(STATISTICS)), np.nan)
    own = weights[:, pool.owners]
    until = np.cumsum(own, axis=1)
    count = until[:, -1:]
    at = np.maximum(count - 1, 0) * PERCENTS_OF_STATISTICS / 100
    floor = np.floor(at).astype(np.int64)
    # One search over all rounds: the counts of each lie above those of the one before.
    row = np.arange(rounds)[:, None]
    lift = row * (count.max() + 1)
    flat = (until + lift).ravel()

    def ranked(rank: Weights) -> Values:
        """The value that so many others of its round precede."""
        found = np.searchsorted(flat, rank + lift, "right") - row * size
        return np.asarray(pool.values[np.minimum(found, size - 1)], np.float64)

    below, above = ranked(floor), ranked(np.minimum(floor + 1, np.maximum(count - 1, 0)))
    # A draw may have none of the answers with values.
    mean = (own @ pool.values)[:, None] / np.maximum(count, 1)
    return np.where(count > 0, np.hstack((mean, below + (above - below) * (at - floor))), np.nan)


def is_enough(pool: Pool, statistic: str) -> bool:
    """Whether so many values tell the statistic at all."""
    percent = 50 if statistic == "avg" else int(statistic[1:])
    beyond = pool.owners[len(pool.owners) * percent // 100 :]
    return len(np.unique(beyond)) >= LEAST_BEYOND
