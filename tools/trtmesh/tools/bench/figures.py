"""Figures of a run by their definitions. Latencies are of answers that are ok, from the planned time on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from trtmesh.tools.bench.measures import MEASURES, Measure, duration_s, gaps_ms
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Run
from trtmesh.tools.bench.slo import Goodput, Slo, goodput

PERCENTS = (1, 5, 10, 25, 50, 75, 90, 95, 99)

STALL_MS = 1000.0
"""A longer gap is a stall."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of a measure's values; percentiles are interpolated linearly, as numpy does."""

    count: int
    sum: float
    avg: float
    std: float
    min: float
    max: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Pool:
    """A measure's values in ascending order, each with the number of the answer that it is of."""

    values: Values
    owners: NDArray[np.intp]

    def distribution(self) -> Distribution | None:
        """None without values."""
        if not self.values.size:
            return None
        percentiles = np.percentile(self.values, PERCENTS)
        return Distribution(
            self.values.size,
            float(self.values.sum()),
            float(self.values.mean()),
            float(self.values.std()),
            float(self.values[0]),
            float(self.values[-1]),
            dict(zip(PERCENTS, map(float, percentiles), strict=True)),
        )


def pool(measure: Measure, answers: Sequence[Answer]) -> Pool:
    """The values of the answers that are ok."""
    of_each = [measure.of(answer) if answer.ok else () for answer in answers]
    values = np.array([value for own in of_each for value in own], dtype=np.float64)
    owners = np.repeat(np.arange(len(answers)), [len(own) for own in of_each])
    order = np.argsort(values, kind="stable")
    return Pool(values[order], owners[order])


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


@dataclass(frozen=True, slots=True)
class Exactness:
    """What became of the bytes of answers that are ok."""

    stalls: int
    """Gaps over a second."""
    stalled: int
    """Streams with one."""
    lost: int | None
    """Tokens that offsets skipped; None where no answer carried offsets."""
    doubled: int | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run."""

    run: Run
    duration_s: float
    counts: Mapping[AnswerOutcome, int]
    distributions: Mapping[str, Distribution]
    """By tag; a measure without values is left out."""
    request_throughput: float
    output_token_throughput: float | None
    """None where the output tokens of some answer are unknown."""
    users: float
    """Mean number of requests under way."""
    lag_ms: Distribution
    exactness: Exactness
    goodput: Goodput | None
    """None without SLOs."""


def figures_of(run: Run, slos: Sequence[Slo] = ()) -> Figures | None:
    """None for a run that sent nothing."""
    answers = run.answers
    if not answers:
        return None
    duration = duration_s(answers)
    per_s = 1 / duration if duration > 0 else 0.0
    ok = [answer for answer in answers if answer.ok]
    tokens = [answer.output_tokens for answer in ok]
    distributions = {each.tag: pool(each, answers).distribution() for each in MEASURES}
    lag = Pool(np.sort(np.array(run.lags_s)) * 1000, np.arange(len(answers))).distribution()
    assert lag
    return Figures(
        run,
        duration,
        {outcome: run.count(outcome) for outcome in AnswerOutcome},
        {tag: each for tag, each in distributions.items() if each},
        len(ok) * per_s,
        None if None in tokens else sum(each or 0 for each in tokens) * per_s,
        sum(answer.ended_s - answer.sent_s for answer in answers) * per_s,
        lag,
        exactness(ok),
        goodput(answers, slos) if slos else None,
    )


def exactness(answers: Sequence[Answer]) -> Exactness:
    stalls = [sum(gap > STALL_MS for gap in gaps_ms(answer)) for answer in answers]
    lost = [answer.lost for answer in answers if answer.lost is not None]
    doubled = [answer.doubled for answer in answers if answer.doubled is not None]
    return Exactness(
        sum(stalls),
        sum(map(bool, stalls)),
        sum(lost) if lost else None,
        sum(doubled) if doubled else None,
    )
