"""What every report of some runs has: their figures, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.figures import Figures, figures_of, pool
from trtmesh.tools.bench.intervals import Interval, intervals_of
from trtmesh.tools.bench.measures import MEASURES
from trtmesh.tools.bench.record import Run
from trtmesh.tools.bench.slo import Slo

MOST_ERRORS = 20
"""Different errors in a report; the rest is counted."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """One run."""

    figures: Figures
    intervals: Mapping[str, Mapping[str, Interval]]
    """By tag and statistic."""
    errors: Sequence[tuple[str, int]]
    """Each with its number, the most frequent first."""

    @property
    def run(self) -> Run:
        return self.figures.run

    @property
    def load(self) -> str:
        return self.run.title


@dataclass(frozen=True, slots=True)
class Report:
    """Runs of one command, or of one file."""

    runs: Sequence[RunReport]
    slos: Sequence[Slo]

    @property
    def is_sweep(self) -> bool:
        return len(self.runs) > 1


def report_of(runs: Sequence[Run], slos: Sequence[Slo] = ()) -> Report:
    """Raises SettingsError for runs without an answer."""
    found = [_of_run(run, slos) for run in runs]
    known = [each for each in found if each]
    if not known:
        raise SettingsError("nothing was sent, so there is nothing to report")
    return Report(known, slos)


def _of_run(run: Run, slos: Sequence[Slo]) -> RunReport | None:
    if (figures := figures_of(run, slos)) is None:
        return None
    pools = {measure.tag: pool(measure, run.answers) for measure in MEASURES}
    intervals = {tag: intervals_of(each, run.answers) for tag, each in pools.items()}
    return RunReport(figures, intervals, _errors(run))


def _errors(run: Run) -> Sequence[tuple[str, int]]:
    counted = Counter(
        f"{each.outcome}: {each.error or 'no reason was given'}"
        for each in run.answers
        if not each.ok
    )
    most = counted.most_common(MOST_ERRORS)
    rest = counted.total() - sum(number for _, number in most)
    return [*most, *([("others", rest)] if rest else [])]
