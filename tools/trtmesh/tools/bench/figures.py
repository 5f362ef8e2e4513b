"""Figures of runs by their definitions, with intervals. Latencies are of answers that are ok, from the planned time
on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.intervals import intervals_of
from trtmesh.tools.bench.measures import MEASURES, STALL_MS, duration_s, gaps_ms
from trtmesh.tools.bench.pools import Pool, pool
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Run
from trtmesh.tools.bench.slo import Slo, goodput

MOST_ERRORS = 20
"""Different errors in a report; the rest is counted."""


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent))


@dataclass(frozen=True, slots=True)
class Exactness:
    """What became of the bytes of answers."""

    stalls: int
    """Gaps over a second."""
    stalled: int
    """Streams with one."""
    lost: int | None
    """Tokens that offsets skipped; None where no answer carried offsets."""
    doubled: int | None


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


class Figures:
    """Of one run with an answer at least."""

    def __init__(self, run: Run, slos: Sequence[Slo] = ()) -> None:
        answers = run.answers
        ok = [each for each in answers if each.ok]
        tokens = [each.output_tokens for each in ok]
        pools = {each.tag: pool(each, answers) for each in MEASURES}
        lags = np.sort([1000 * each.lag_s for each in answers])
        self.run = run
        self.load = run.title
        self.duration_s = duration_s(answers)
        per_s = 1 / self.duration_s if self.duration_s > 0 else 0.0
        self.counts = {outcome: run.count(outcome) for outcome in AnswerOutcome}
        self.distributions = {
            tag: seen for tag, each in pools.items() if (seen := each.distribution())
        }
        """By tag; a measure without values is left out."""
        self.intervals = {tag: intervals_of(each, answers) for tag, each in pools.items()}
        """By tag and statistic."""
        self.request_throughput = len(ok) * per_s
        self.output_token_throughput = (
            None if None in tokens else sum(each or 0 for each in tokens) * per_s
        )
        """None where the output tokens of some answer are unknown."""
        self.users = sum(each.busy_s for each in answers) * per_s
        """Mean number of requests under way."""
        self.lag_ms = Pool(lags, np.arange(len(answers))).distribution()
        self.exactness = exactness(ok)
        self.goodput = goodput(answers, slos) if slos else None
        self.errors = _errors(answers)
        """Each with its number, the most frequent first."""


def _errors(answers: Sequence[Answer]) -> Sequence[tuple[str, int]]:
    counted = Counter(
        f"{each.outcome}: {each.error or 'no reason was given'}" for each in answers if not each.ok
    )
    most = counted.most_common(MOST_ERRORS)
    rest = counted.total() - sum(number for _, number in most)
    return [*most, *([("others", rest)] if rest else [])]


@dataclass(frozen=True, slots=True)
class Report:
    """Runs of one command, or of one file."""

    runs: Sequence[Figures]
    slos: Sequence[Slo]

    @property
    def is_sweep(self) -> bool:
        return len(self.runs) > 1


def report_of(runs: Sequence[Run], slos: Sequence[Slo] = ()) -> Report:
    """Raises SettingsError for runs without an answer."""
    known = [Figures(run, slos) for run in runs if run.answers]
    if not known:
        raise SettingsError("nothing was sent, so there is nothing to report")
    return Report(known, slos)


@dataclass(frozen=True, slots=True)
class Total:
    """One number of a whole run."""

    tag: str
    """aiperf's, where it has the number."""
    name: str
    unit: str
    definition: str
    of: Callable[[Figures], float | None]


def _count(outcome: AnswerOutcome) -> Callable[[Figures], float]:
    return lambda figures: figures.counts[outcome]


def _lag(percent: int) -> Callable[[Figures], float | None]:
    return lambda figures: figures.lag_ms.percentiles[percent] if figures.lag_ms else None


# fmt: off
TOTALS: Sequence[Total] = (
    Total("request_throughput", "requests", "requests/sec", "answers ok / duration", lambda of: of.request_throughput),
    Total(
        "output_token_throughput", "output tokens", "tokens/sec", "output tokens of answers ok / duration",
        lambda of: of.output_token_throughput),
    Total(
        "goodput", "goodput", "requests/sec", "answers that meet every SLO / duration",
        lambda of: of.goodput.per_s if of.goodput else None),
    Total(
        "good_request_count", "good", "requests", "answers that meet every SLO",
        lambda of: of.goodput.good if of.goodput else None),
    Total(
        "good_request_fraction", "attainment", "ratio", "answers that meet every SLO / all that were not cancelled",
        lambda of: of.goodput.attainment if of.goodput else None),
    Total("request_count", "ok", "requests", "answers ok", _count(AnswerOutcome.OK)),
    Total("error_request_count", "errors", "requests", "answers that failed", _count(AnswerOutcome.ERROR)),
    Total(
        "refused_request_count", "refused", "requests", "requests for which the server had no room",
        _count(AnswerOutcome.REFUSED)),
    Total(
        "cancelled_request_count", "cancelled", "requests",
        "requests that the end of the run, or someone else, cancelled", _count(AnswerOutcome.CANCELLED)),
    Total("stall_count", "stalls", "gaps", "gaps over 1 s in answers ok", lambda of: of.exactness.stalls),
    Total(
        "stalled_request_count", "stalled streams", "requests", "answers ok with a gap over 1 s",
        lambda of: of.exactness.stalled),
    Total("lost_token_count", "lost tokens", "tokens", "tokens that offsets skipped", lambda of: of.exactness.lost),
    Total("doubled_token_count", "doubled tokens", "tokens", "tokens that came again", lambda of: of.exactness.doubled),
    Total("mean_concurrency", "under way", "requests", "mean number of requests under way", lambda of: of.users),
    Total("benchmark_duration", "duration", "sec", "first send to last end", lambda of: of.duration_s),
    Total("replay_sched_lag_p50", "lag p50", "ms", "sent minus planned time", _lag(50)),
    Total("replay_sched_lag_p90", "lag p90", "ms", "sent minus planned time", _lag(90)),
    Total("replay_sched_lag_p99", "lag p99", "ms", "sent minus planned time", _lag(99)),
)
# fmt: on
