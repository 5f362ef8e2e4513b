"""What a fleet would do with a load: a replay, measured as `trtmesh bench` measures answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.bench.measures import E2E, TPOT, TTFT, Measure
from trtmesh.tools.bench.pools import Distribution, pool
from trtmesh.tools.bench.record import Answer, AnswerOutcome, Run
from trtmesh.tools.bench.slo import Slo, goodput, parse_slos
from trtmesh.tools.fleet_replay.fleet_model import FleetModel
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import Arrival

POLICY = "auto"
MEASURES: tuple[Measure, ...] = (TTFT, TPOT, E2E)
PERCENTS = (50, 90, 99)
DIGITS = 4
"""Of the largest number of engines that is simulated."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Engines by role: all mixed, or the two halves of a disaggregated fleet."""

    mixed: int = 0
    prefill: int = 0
    decode: int = 0

    @property
    def total(self) -> int:
        return self.mixed + self.prefill + self.decode

    @classmethod
    def parse(cls, text: str, setting: str) -> Counts:
        """Reads `3`, mixed engines, or `1+2`, prefill and decode. Raises SettingsError."""
        parts = [int(p) if p.isdecimal() and len(p) <= DIGITS else 0 for p in text.split("+")]
        if not 1 <= len(parts) <= 2 or not all(parts):
            raise SettingsError(
                f"is {text[:40]!r} but must be mixed engines, as 3, or prefill and decode, as 1+2, each of at most"
                f" {DIGITS} digits",
                setting=setting,
            )
        return cls(*parts) if len(parts) == 1 else cls(0, *parts)

    def __str__(self) -> str:
        return (
            f"{self.mixed} mixed"
            if self.mixed
            else f"{self.prefill} prefill + {self.decode} decode"
        )


def simulated_slos(texts: Sequence[str]) -> tuple[Slo, ...]:
    """The limits of `--slo`. Raises SettingsError."""
    slos = parse_slos(texts)
    if not slos or any(slo.name == "gap" for slo in slos):
        raise SettingsError(
            "needs a limit as ttft:500, and none of gap, since a replay knows no single gaps",
            setting="--slo",
        )
    return slos


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answers of a simulated fleet."""

    counts: Counts
    attainment: float
    measures: Mapping[str, Distribution]
    """By the measure's name; one without values is left out."""
    busy: Mapping[str, float]
    """Share of the time in which the engines of a role computed."""
    hit_rate: float
    sequences: float
    """Mean number beside each other in a step that generates."""

    def figures(self) -> dict[str, Any]:
        """For a report; times in milliseconds."""
        times = {
            f"{name} p{percent}": round(each.percentiles[percent], 1)
            for name, each in self.measures.items()
            for percent in PERCENTS
        }
        return {
            "engines": str(self.counts),
            "counts": asdict(self.counts),
            "shares": {
                "good": round(self.attainment, 4),
                "reused": round(self.hit_rate, 4),
                **{f"{role} busy": round(share, 3) for role, share in self.busy.items()},
            },
            "sequences": round(self.sequences, 1),
            "ms": times,
        }


def forecast(
    arrivals: Sequence[Arrival], model: FleetModel, counts: Counts, slos: Sequence[Slo]
) -> Forecast:
    """Replays the load over a fleet of so many engines."""
    fleet = replace(
        model, workers=counts.total, prefill_workers=counts.prefill, decode_workers=counts.decode
    )
    result = replay(arrivals, POLICY, fleet)
    times = zip(arrivals, result.first_token_seconds, result.end_seconds, strict=True)
    answers = [_answer(n, *each) for n, each in enumerate(times)]
    busy: dict[str, list[float]] = {}
    for role, seconds in zip(fleet.roles, result.busy_by_worker, strict=True):
        busy.setdefault(role.value, []).append(seconds / result.seconds if result.seconds else 0.0)
    decoding = sum(
        e - f for f, e in zip(result.first_token_seconds, result.end_seconds, strict=True)
    )
    return Forecast(
        counts,
        goodput(answers, slos).attainment,
        distributions(answers),
        {role: fmean(shares) for role, shares in busy.items()},
        result.hit_rate,
        decoding / max(sum(result.busy_by_worker), 1e-9),
    )


def _answer(number: int, arrival: Arrival, first: float, end: float) -> Answer:
    tokens = max(1, arrival.new_tokens)
    chunks = ((first, 1), (end, tokens - 1)) if tokens > 1 else ((end, 1),)
    return Answer(
        index=number,
        batch_index=0,
        request_id=str(number),
        planned_s=arrival.seconds,
        sent_s=arrival.seconds,
        ended_s=arrival.seconds + end,
        outcome=AnswerOutcome.OK,
        arrivals_s=tuple(arrival.seconds + at for at, _ in chunks),
        tokens=tuple(count for _, count in chunks),
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=tokens,
    )


def distributions(answers: Sequence[Answer]) -> dict[str, Distribution]:
    """Of the measures that are forecast, by their names."""
    found = {measure.name: pool(measure, answers).distribution() for measure in MEASURES}
    return {name: each for name, each in found.items() if each}


def check_of(foreseen: Forecast, measured: Run) -> list[dict[str, Any]]:
    """The forecast beside a run of the same load; errors are relative to what was measured."""
    seen = distributions(measured.answers)
    return [
        {
            "ms": f"{name} p{percent}",
            "forecast": round(each.percentiles[percent], 1),
            "measured": round(seen[name].percentiles[percent], 1),
            "error": round(each.percentiles[percent] / seen[name].percentiles[percent] - 1, 4),
        }
        for name, each in foreseen.measures.items()
        if name in seen
        for percent in PERCENTS
    ]
