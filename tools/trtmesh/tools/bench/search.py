"""The highest rate at which the SLOs hold, by bisection."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from trtmesh.tools.bench.record import Run
from trtmesh.tools.bench.saturation import saturation
from trtmesh.tools.bench.slo import Slo, goodput

LEVEL = 0.95
REPEATS = 3
"""Runs of one rate at most; more than one only where the first leaves open whether the SLOs hold."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one run at a rate showed."""

    rate: float
    good: int
    counted: int
    is_behind: bool

    @property
    def attainment(self) -> float:
        return self.good / self.counted if self.counted else 0.0


@dataclass(frozen=True, slots=True)
class Goal:
    """What is searched, and how closely."""

    attainment: float = 0.99
    """Share of the answers that must meet every SLO."""
    start: float = 1.0
    """Requests per second of the first run."""
    lowest: float = 0.01
    highest: float = 10_000.0
    tolerance: float = 0.05
    """The search is over when the lowest rate that fails is at most so much above the highest that holds."""
    trials: int = 30
    """Most runs."""


@dataclass(frozen=True, slots=True)
class Found:
    """The end of a search: the rate is at least `holds` and below `fails`."""

    holds: float | None
    """None if no rate holds."""
    fails: float | None
    """None if every rate up to the highest holds."""
    trials: Sequence[Trial]
    why: str


def next_rate(trials: Sequence[Trial], goal: Goal) -> float | Found:
    """What to run next, or the end. Doubles or halves the rate until one holds and one fails, then bisects."""
    if not trials:
        return goal.start
    if _is_open(trials, goal) and len(trials) < goal.trials:
        return trials[-1].rate
    held, fails = bounds(trials, goal)
    if held is not None and fails is not None and fails <= held * (1 + goal.tolerance):
        return Found(held, fails, trials, f"rates are within {goal.tolerance:.0%}")
    if fails is None and held is not None and held >= goal.highest:
        return Found(held, None, trials, "the SLOs hold at the highest rate")
    if held is None and fails is not None and fails <= goal.lowest:
        return Found(None, fails, trials, "the SLOs fail at the lowest rate")
    if len(trials) >= goal.trials:
        return Found(held, fails, trials, f"{goal.trials} runs are over")
    if fails is None:
        return min(2 * (held or goal.start), goal.highest)
    if held is None:
        return max(fails / 2, goal.lowest)
    return math.sqrt(held * fails)


def bounds(trials: Sequence[Trial], goal: Goal) -> tuple[float | None, float | None]:
    """The highest rate that holds, and the lowest that fails."""
    verdicts = {each.rate: holds(trials, each.rate, goal) for each in trials}
    fails = min((rate for rate, good in verdicts.items() if not good), default=None)
    # A rate that holds above one that fails was luck.
    below = math.inf if fails is None else fails
    held = max((rate for rate, good in verdicts.items() if good and rate < below), default=None)
    return held, fails


def holds(trials: Sequence[Trial], rate: float, goal: Goal) -> bool:
    """By all runs of the rate together."""
    own = [each for each in trials if each.rate == rate]
    counted = sum(each.counted for each in own)
    good = sum(each.good for each in own)
    behind = 2 * sum(each.is_behind for each in own) > len(own)
    return counted > 0 and good >= goal.attainment * counted and not behind


def _is_open(trials: Sequence[Trial], goal: Goal) -> bool:
    """Whether the last rate needs another run: the interval of its attainment includes the goal."""
    own = [each for each in trials if each.rate == trials[-1].rate]
    if len(own) >= REPEATS or any(each.is_behind for each in own):
        return False
    low, high = wilson(sum(each.good for each in own), sum(each.counted for each in own))
    return low < goal.attainment < high


def wilson(good: int, counted: int, level: float = LEVEL) -> tuple[float, float]:
    """The interval of a share. Wilson's has a width at 0 and 1 as well."""
    if not counted:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = good / counted, z * z / counted
    middle = share + spread / 2
    reach = z * math.sqrt(share * (1 - share) / counted + spread / counted / 4)
    return (middle - reach) / (1 + spread), (middle + reach) / (1 + spread)


async def find(
    run_at: Callable[[float], Awaitable[Run | None]],
    slos: Sequence[Slo],
    goal: Goal,
    report: Callable[[Trial], None],
) -> Found:
    """Runs one rate after another, until one is given up. `report` hears of each run when it is over."""
    trials: list[Trial] = []
    while not isinstance(step := next_rate(trials, goal), Found):
        if (run := await run_at(step)) is None:
            return Found(*bounds(trials, goal), trials, "it was given up")
        trials.append(trial(step, run, slos))
        report(trials[-1])
    return step


def trial(rate: float, run: Run, slos: Sequence[Slo]) -> Trial:
    seen = goodput(run.answers, slos)
    trend = saturation(run.answers)
    return Trial(rate, seen.good, seen.counted, bool(trend and trend.is_behind))
