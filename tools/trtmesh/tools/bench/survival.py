"""What disruptions did to the streams of a run, against the undisturbed run of the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.comparison import is_identical
from trtmesh.tools.bench.figures import exactness
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Disruption, Run


@dataclass(frozen=True, slots=True)
class Stalls:
    """The longest silence of each stream that had begun and not ended when the first disruption came, or began later,
    in milliseconds."""

    streams: int
    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Survival:
    """Streams of both runs, paired by prompt."""

    disruptions: tuple[Disruption, ...]
    compared: int
    """Prompts that the undisturbed run answered, and this one sent and did not cancel itself."""
    identical: int
    """Of them, those whose answer has the same bytes."""
    different: tuple[int, ...]
    """Indexes of the prompts with other bytes, or an error."""
    lost: int | None
    """Tokens that the offsets skipped; None where the protocol has no offsets."""
    doubled: int | None
    stalls: Stalls | None
    """None if no stream had two chunks."""

    @property
    def share(self) -> float:
        return self.identical / self.compared if self.compared else 0.0


def survival(run: Run, baseline: Run) -> Survival:
    """Raises SettingsError for runs of different prompts."""
    for name in ("seed", "workload", "model"):
        ours, theirs = getattr(run.header, name), getattr(baseline.header, name)
        if ours != theirs:
            raise SettingsError(
                f"has the {name} {theirs!r} but this run has {ours!r}; measure both with the same options",
                setting="--baseline",
            )
    known = {_key(each): each for each in baseline.answers if each.ok}
    pairs = [
        (each, known[_key(each)])
        for each in run.answers
        if each.outcome is not AnswerOutcome.CANCELLED and _key(each) in known
    ]
    different = [mine.index for mine, other in pairs if not (mine.ok and is_identical(mine, other))]
    disruptions = run.end.disruptions if run.end else ()
    offsets = exactness(run.answers)
    return Survival(
        disruptions,
        len(pairs),
        len(pairs) - len(different),
        tuple(sorted(different)),
        offsets.lost,
        offsets.doubled,
        _stalls(run.answers, min((each.at_s for each in disruptions), default=0.0)),
    )


def _key(answer: Answer) -> tuple[int, int]:
    return answer.index, answer.batch_index


def _stalls(answers: Sequence[Answer], from_s: float) -> Stalls | None:
    longest = [gap for each in answers if (gap := _longest_gap_s(each, from_s)) is not None]
    if not longest:
        return None
    p50, p99, most = np.percentile(np.array(longest) * 1000, (50, 99, 100))
    return Stalls(len(longest), float(p50), float(p99), float(most))


def _longest_gap_s(answer: Answer, from_s: float) -> float | None:
    """Of the gaps that end after `from_s`. A stream that broke was silent until its end."""
    times = answer.arrivals_s if answer.ok else (*answer.arrivals_s, answer.ended_s)
    gaps = [after - before for before, after in pairwise(times) if after >= from_s]
    return max(gaps, default=None)


def shown(found: Survival) -> list[str]:
    """In lines for people."""
    lines = [
        f"{each.kind} {each.target} at {each.at_s:.1f} s, over at {each.ended_s:.1f} s"
        + (f": {each.error}" if each.error else "")
        for each in found.disruptions
    ]
    lines.append(
        f"identical to the undisturbed run: {found.identical} of {found.compared} streams"
        f" ({100 * found.share:.2f} %)"
    )
    if found.different:
        first = ", ".join(map(str, found.different[:10]))
        lines.append(f"different: {first}{', ...' if len(found.different) > 10 else ''}")
    if found.stalls:
        stalls = found.stalls
        lines.append(
            f"longest silence of {stalls.streams} streams: p50 {stalls.p50_ms:.0f} ms,"
            f" p99 {stalls.p99_ms:.0f} ms, max {stalls.max_ms:.0f} ms"
        )
    for name, count in (("lost", found.lost), ("doubled", found.doubled)):
        lines.append(f"tokens {name}: {'the protocol has no offsets' if count is None else count}")
    return lines
