"""Whether two runs of one workload differ: prompt by prompt, and by more than chance.

Run B is better or worse by a ratio of figures, B / A. Both runs are drawn again by the same prompts, so what a long
prompt costs in both is no difference between them. All intervals of a comparison hold together with 95 %: were the runs
alike, one comparison in twenty would find a difference anywhere in its table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
LEVEL_OF_EACH = 1 - (1 - LEVEL) / (2 + len(JUDGED) * len(STATISTICS))
"""Of the intervals of a table, for all to hold together."""


def compare(a: Run, b: Run, threshold: float) -> Comparison:
    """Raises SettingsError for runs of different workloads."""
    for name in ("workload", "seed"):
        one, other = getattr(a.header, name), getattr(b.header, name)
        if one != other:
            raise SettingsError(
                f"the runs have different workloads: {name} is {one!r} in A and {other!r} in B; run both with the"
                " same prompts and seed"
            )
    pairs = paired(a, b)
    if not pairs:
        raise SettingsError("the runs have no prompt in common: there is nothing to compare")
    ok = [(one, other) for one, other in pairs if one.ok and other.ok]
    ratios = [*_share_ok(pairs, threshold)]
    if ok:
        ratios += _throughput(a, b, pairs, threshold)
        ratios += [each for measure in JUDGED for each in _latencies(measure, ok, threshold)]
    return Comparison(
        a.title,
        len(pairs),
        len(a.answers) - len(pairs),
        len(b.answers) - len(pairs),
        sum(not one.ok for one, _ in pairs),
        sum(not other.ok for _, other in pairs),
        len(ok),
        sum(is_identical(one, other) for one, other in ok),
        sum(one.prompt_tokens != other.prompt_tokens for one, other in ok),
        ratios,
    )


def paired(a: Run, b: Run) -> list[Pair]:
    """By prompt and place in its batch, and by how often it was sent before."""
    of_a, of_b = map(_by_prompt, (a, b))
    return [(of_a[key], of_b[key]) for key in of_a if key in of_b]


def _by_prompt(run: Run) -> Mapping[tuple[int, int, int], Answer]:
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


def _quotient(over: float, under: float) -> float:
    return over / under if under else (1.0 if over == under else math.inf)


Of = Callable[[int, Weights], Values]
"""Statistics of run A, 0, or B, 1, with each pair so often, [rounds, statistics]."""


@dataclass(frozen=True, slots=True)
class _Judge:
    """Of one figure."""

    name: str
    unit: str
    threshold: float
    larger_is_better: bool = True

    def ratios(
        self, of: Of, tells: Mapping[str, bool], pairs: Sequence[Pair], values: int
    ) -> Iterator[Ratio]:
        """Of each statistic that both runs have; `tells` says whether the pairs are enough for it. `values` is how many
        a round looks at."""
        everyone = np.ones((1, len(pairs)), np.int64)
        observed = [of(side, everyone)[0].tolist() for side in (0, 1)]
        requests = [one.request_id for one, _ in pairs]
        rounds = bootstrap(requests, lambda weights: of(1, weights) / of(0, weights), values)
        for at, (statistic, enough) in enumerate(tells.items()):
            a, b = observed[0][at], observed[1][at]
            if math.isfinite(a) and math.isfinite(b):
                within = interval(rounds[:, at], LEVEL_OF_EACH) if enough else None
                verdict = self._verdict(a, b, within)
                yield Ratio(self.name, statistic, self.unit, a, b, _quotient(b, a), within, verdict)

    def _verdict(self, a: float, b: float, within: Interval | None) -> Verdict:
        if within is None:
            return Verdict.TOO_FEW
        if within.includes(1.0):
            return Verdict.NOISE
        loss = _quotient(a, b) if self.larger_is_better else _quotient(b, a)
        if loss < 1:
            return Verdict.BETTER
        return Verdict.REGRESSION if loss > 1 + self.threshold else Verdict.WORSE


def _latencies(measure: Measure, ok: Sequence[Pair], threshold: float) -> Iterator[Ratio]:
    pools = [pool(measure, side) for side in zip(*ok, strict=True)]
    tells = {each: all(is_enough(own, each) for own in pools) for each in STATISTICS}

    def of(side: int, weights: Weights) -> Values:
        return weighted_statistics(pools[side], weights)

    judge = _Judge(measure.name, measure.unit, threshold, measure.larger_is_better)
    return judge.ratios(of, tells, ok, max(each.values.size for each in pools))


def _throughput(a: Run, b: Run, pairs: Sequence[Pair], threshold: float) -> Iterator[Ratio]:
    """Output tokens per second. At one concurrency a run lasts as long as its latencies together demand (Little's law),
    so a draw lasts as long as its requests would."""
    sides = list(zip(*pairs, strict=True))
    tokens = [np.array([(each.output_tokens or 0) * each.ok for each in side]) for side in sides]
    busy = [np.array([each.busy_s for each in side]) for side in sides]
    users = [sum(each.busy_s for each in run.answers) / duration_s(run.answers) for run in (a, b)]

    def of(side: int, weights: Weights) -> Values:
        rates = weights @ tokens[side] / (weights @ busy[side]) * users[side]
        return np.asarray(rates, np.float64)[:, None]

    judge = _Judge("output tokens", "tokens/sec", threshold)
    return judge.ratios(of, _tells(pairs), pairs, len(pairs))


def _share_ok(pairs: Sequence[Pair], threshold: float) -> Iterator[Ratio]:
    ok = [np.array([100.0 * each.ok for each in side]) for side in zip(*pairs, strict=True)]

    def of(side: int, weights: Weights) -> Values:
        return np.asarray(weights @ ok[side] / len(pairs))[:, None]

    return _Judge("answers ok", "%", threshold).ratios(of, _tells(pairs), pairs, len(pairs))


def _tells(pairs: Sequence[Pair]) -> Mapping[str, bool]:
    return {"avg": len(pairs) >= 2 * LEAST_BEYOND}
