"""What disruptions did to the streams of a run, against the undisturbed run of the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from trtmesh.tools.bench.comparison import is_identical, paired
from trtmesh.tools.bench.figures import Exactness, exactness
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Disruption, Run


@dataclass(frozen=True, slots=True)
class Survival:
    """Streams of both runs, paired by prompt."""

    disruptions: Sequence[Disruption]
    compared: int
    """Prompts that the undisturbed run answered, and this one sent and did not cancel itself."""
    different: Sequence[int]
    """Indexes of those whose answer has other bytes, or an error."""
    offsets: Exactness
    silences_ms: Sequence[float]
    """The longest one of each stream that had begun and not ended when the first disruption came, or began later."""


def survival(run: Run, undisturbed: Run) -> Survival:
    pairs = [
        (mine, other)
        for mine, other in paired(run, undisturbed)
        if other.ok and mine.outcome is not AnswerOutcome.CANCELLED
    ]
    different = [mine.index for mine, other in pairs if not (mine.ok and is_identical(mine, other))]
    disruptions = run.end.disruptions if run.end else ()
    from_s = min((each.at_s for each in disruptions), default=0.0)
    silences = [silence for each in run.answers for silence in _longest_silence_ms(each, from_s)]
    return Survival(disruptions, len(pairs), sorted(different), exactness(run.answers), silences)


def _longest_silence_ms(answer: Answer, from_s: float) -> Sequence[float]:
    """Of those that end after `from_s`. A stream that broke was silent until its end."""
    times = answer.arrivals_s if answer.ok else (*answer.arrivals_s, answer.ended_s)
    gaps = [1000 * (after - before) for before, after in pairwise(times) if after >= from_s]
    return [max(gaps)] if gaps else []


def shown(found: Survival) -> list[str]:
    """In lines for people."""
    lines = [
        f"{each.kind} {each.target} at {each.at_s:.1f} s, over at {each.ended_s:.1f} s"
        + (f": {each.error}" if each.error else "")
        for each in found.disruptions
    ]
    identical = found.compared - len(found.different)
    lines.append(
        f"identical to the undisturbed run: {identical} of {found.compared} streams"
        f" ({100 * identical / max(found.compared, 1):.2f} %)"
    )
    if found.different:
        first = ", ".join(map(str, found.different[:10]))
        lines.append(f"different: {first}{', ...' if len(found.different) > 10 else ''}")
    if found.silences_ms:
        p50, p99, most = np.percentile(found.silences_ms, (50, 99, 100))
        lines.append(
            f"longest silence of {len(found.silences_ms)} streams: p50 {p50:.0f} ms, p99 {p99:.0f} ms,"
            f" max {most:.0f} ms"
        )
    for name, count in (("lost", found.offsets.lost), ("doubled", found.offsets.doubled)):
        lines.append(f"tokens {name}: {'the protocol has no offsets' if count is None else count}")
    return lines
