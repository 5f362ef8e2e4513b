"""Limits of an answer's latencies, and how many answers keep them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.measures import E2E, ITL, LONGEST_GAP, TPOT, TTFT, Measure, duration_s
from trtmesh.tools.bench.record import Answer, AnswerOutcome


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit that an answer keeps or not."""

    name: str
    limit_ms: float

    def is_met(self, answer: Answer) -> bool:
        if values := SLO_MEASURES[self.name].of(answer):
            return all(value <= self.limit_ms for value in values)
        # Without a second token there is no time between tokens to be late; without a first the answer never came, and
        # where nobody counted the tokens, their times are unknown.
        is_known = self.name == "gap" or answer.output_tokens is not None
        return bool(answer.arrivals_s) and self.name != "ttft" and is_known


SLO_MEASURES: Mapping[str, Measure] = {
    "ttft": TTFT, "tpot": TPOT, "itl": ITL, "e2e": E2E, "gap": LONGEST_GAP,
}  # fmt: skip


def is_good(answer: Answer, slos: Sequence[Slo]) -> bool:
    """Whether it is ok and meets all of them."""
    return answer.ok and all(slo.is_met(answer) for slo in slos)


def parse_slos(texts: Sequence[str]) -> tuple[Slo, ...]:
    """Reads `ttft:200 tpot:30`, in one text or several. Raises SettingsError for what is no limit."""
    limits: dict[str, float] = {}
    for text in (part for each in texts for part in each.split()):
        name, _, limit = text.partition(":")
        if name not in SLO_MEASURES:
            raise SettingsError(f"SLO {text!r} must begin with one of {', '.join(SLO_MEASURES)}")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = math.nan
        if not 0 < limits[name] < math.inf:
            raise SettingsError(f"SLO {text!r} must have milliseconds above 0, as in {name}:200")
    return tuple(Slo(name, limit) for name, limit in limits.items())


@dataclass(frozen=True, slots=True)
class Goodput:
    """Answers that meet every SLO, of those not cancelled."""

    good: int
    counted: int
    per_s: float

    @property
    def attainment(self) -> float:
        return self.good / self.counted if self.counted else 0.0


def goodput(answers: Sequence[Answer], slos: Sequence[Slo]) -> Goodput:
    counted = [each for each in answers if each.outcome is not AnswerOutcome.CANCELLED]
    good = sum(is_good(answer, slos) for answer in counted)
    duration = duration_s(answers)
    return Goodput(good, len(counted), good / duration if duration > 0 else 0.0)
