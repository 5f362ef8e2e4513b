"""Whether two runs of one workload differ: prompt by prompt, and by more than chance.

Run B is better or worse by a ratio of figures, B / A. Both runs are drawn again by the same prompts, so what a long
prompt costs in both is no difference between them. All intervals of a comparison hold together with 95 %: were the runs
alike, one comparison in twenty would find a difference anywhere in its table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.intervals import (
    LEAST_BEYOND,
    LEVEL,
    STATISTICS,
    Interval,
    Weights,
    bootstrap,
    interval,
    is_enough,
    weighted_statistics,
)
from trtmesh.tools.bench.measures import E2E, GAP, TPOT, TTFT, Measure, duration_s
from trtmesh.tools.bench.pools import Values, pool
from trtmesh.tools.bench.record import Answer, Run


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    """Surely worse, by less than the threshold."""
    REGRESSION = "regression"
    NOISE = "noise"
    """The interval includes 1."""
    TOO_FEW = "too few"
    """So few answers say nothing about this figure."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A figure of both runs, and B / A."""

    name: str
    statistic: str
    unit: str
    a: float
    b: float
    ratio: float
    interval: Interval | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of two runs under one load."""

    load: str
    pairs: int
    """Prompts that both runs sent."""
    only_a: int
    only_b: int
    failed_a: int
    """Pairs whose answer is not ok."""
    failed_b: int
    compared: int
    """Pairs with two answers that are ok."""
    identical: int
    """Of those, with equal bytes."""
    prompts_differ: int
    """Of those, with different numbers of prompt tokens."""
    ratios: Sequence[Ratio]

    @property
    def is_regression(self) -> bool:
        return any(each.verdict is Verdict.REGRESSION for each in self.ratios)


Pair = tuple[Answer, Answer]

JUDGED: Sequence[Measure] = (TTFT, TPOT, GAP, E2E)


def compare(a: Run, b: Run, threshold: float) -> Comparison:
    """Raises SettingsError for runs of different workloads."""
    _check_workloads(a, b)
    of_a, of_b = _by_prompt(a), _by_prompt(b)
    both = [(of_a[key], of_b[key]) for key in of_a if key in of_b]
    if not both:
        raise SettingsError("the runs have no prompt in common: there is nothing to compare")
    ok = [(one, other) for one, other in both if one.ok and other.ok]
    return Comparison(
        a.title,
        len(both),
        len(of_a) - len(both),
        len(of_b) - len(both),
        sum(not one.ok for one, _ in both),
        sum(not other.ok for _, other in both),
        len(ok),
        sum(is_identical(one, other) for one, other in ok),
        sum(one.prompt_tokens != other.prompt_tokens for one, other in ok),
        [*_ratios(a, b, both, ok, threshold)],
    )


def _check_workloads(a: Run, b: Run) -> None:
    for name in ("workload", "seed"):
        one, other = getattr(a.header, name), getattr(b.header, name)
        if one != other:
            raise SettingsError(
                f"the runs have different workloads: {name} is {one!r} in A and {other!r} in B; run both with the"
                " same prompts and seed"
            )


def _by_prompt(run: Run) -> Mapping[tuple[int, int, int], Answer]:
    """By prompt and place in its batch, and by how often it was sent before."""
    seen: Counter[tuple[int, int]] = Counter()
    found = {}
    for answer in sorted(run.answers, key=lambda each: each.sent_s):
        key = (answer.index, answer.batch_index)
        found[*key, seen[key]] = answer
        seen[key] += 1
    return found


def is_identical(one: Answer, other: Answer) -> bool:
    """By text, and by token ids where both protocols have them."""
    if one.text_sha256 != other.text_sha256:
        return False
    return None in (one.ids_sha256, other.ids_sha256) or one.ids_sha256 == other.ids_sha256


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure of both runs; arrays have an entry for each statistic."""

    name: str
    statistics: Sequence[str]
    unit: str
    larger_is_better: bool
    is_enough: Sequence[bool]
    observed: tuple[Values, Values]
    ratios: Values
    """[rounds, statistics]"""


def _ratios(
    a: Run, b: Run, both: Sequence[Pair], ok: Sequence[Pair], threshold: float
) -> Sequence[Ratio]:
    figures = [_share_ok(both)]
    if ok:
        figures += [_throughput(a, b, both), *(_latencies(measure, ok) for measure in JUDGED)]
    judged = [
        (figure, column)
        for figure in figures
        for column in range(len(figure.statistics))
        if np.isfinite([each[column] for each in figure.observed]).all()
    ]
    level = 1 - (1 - LEVEL) / len(judged)
    return [_judge(figure, column, level, threshold) for figure, column in judged]


def _judge(figure: _Figure, column: int, level: float, threshold: float) -> Ratio:
    a, b = (float(each[column]) for each in figure.observed)
    ratio = _quotient(b, a)
    within = interval(figure.ratios[:, column], level)
    loss = _quotient(a, b) if figure.larger_is_better else ratio
    if within is None or not figure.is_enough[column]:
        verdict = Verdict.TOO_FEW
    elif within.includes(1.0):
        verdict = Verdict.NOISE
    elif loss < 1:
        verdict = Verdict.BETTER
    else:
        verdict = Verdict.REGRESSION if loss > 1 + threshold else Verdict.WORSE
    return Ratio(figure.name, figure.statistics[column], figure.unit, a, b, ratio, within, verdict)


def _quotient(over: float, under: float) -> float:
    return over / under if under else (1.0 if over == under else math.inf)


def _latencies(measure: Measure, ok: Sequence[Pair]) -> _Figure:
    pools = [pool(measure, side) for side in zip(*ok, strict=True)]

    def ratios(weights: Weights) -> Values:
        a, b = (weighted_statistics(each, weights) for each in pools)
        return b / a

    a, b = (weighted_statistics(each, np.ones((1, len(ok)), np.int64))[0] for each in pools)
    return _Figure(
        measure.name,
        STATISTICS,
        measure.unit,
        measure.larger_is_better,
        [all(is_enough(each, statistic) for each in pools) for statistic in STATISTICS],
        (a, b),
        bootstrap(_requests(ok), ratios, max(each.values.size for each in pools)),
    )


def _throughput(a: Run, b: Run, both: Sequence[Pair]) -> _Figure:
    """Output tokens per second. At one concurrency a run lasts as long as its latencies together demand (Little's law),
    so a draw lasts as long as its requests would."""
    sides = list(zip(*both, strict=True))
    tokens = [np.array([(each.output_tokens or 0) * each.ok for each in side]) for side in sides]
    busy = [np.array([_busy_s(each) for each in side]) for side in sides]
    users = [sum(map(_busy_s, run.answers)) / duration_s(run.answers) for run in (a, b)]

    def rate(side: int, weights: Weights) -> Values:
        found = weights @ tokens[side] / (weights @ busy[side]) * users[side]
        return np.asarray(found, np.float64)

    return _of_share("output tokens", "tokens/sec", both, rate)


def _busy_s(answer: Answer) -> float:
    return answer.ended_s - answer.sent_s


def _share_ok(both: Sequence[Pair]) -> _Figure:
    ok = [np.array([100.0 * each.ok for each in side]) for side in zip(*both, strict=True)]
    return _of_share(
        "answers ok",
        "%",
        both,
        lambda side, weights: weights @ ok[side] / len(both),
    )


def _of_share(
    name: str, unit: str, both: Sequence[Pair], figure: Callable[[int, Weights], Values]
) -> _Figure:
    """A figure of all pairs, larger where it is better."""
    everyone = np.ones((1, len(both)), np.int64)
    return _Figure(
        name,
        ("avg",),
        unit,
        larger_is_better=True,
        is_enough=[len(both) >= 2 * LEAST_BEYOND],
        observed=(figure(0, everyone), figure(1, everyone)),
        ratios=bootstrap(
            _requests(both),
            lambda weights: (figure(1, weights) / figure(0, weights))[:, None],
            len(both),
        ),
    )


def _requests(pairs: Sequence[Pair]) -> Sequence[str]:
    return [a.request_id for a, _ in pairs]
