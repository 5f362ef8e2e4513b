"""Where an item goes: pure functions over a snapshot of the fleet. Filter, score, pick."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trtmesh.chassis.errors import NoWorker, TrtmeshError, UnsupportedField


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker at the moment of a placement.

    `problem` says why it cannot take items; '' when it can. `sequences` counts what it runs and what waits there,
    with everything that this router dispatched since the worker's last report.
    """

    address: str
    worker: str
    model: str
    problem: str
    sequences: int
    supported_fields: frozenset[str]
    last_turn: int
    """Number of the placement that chose it last; 0 when none did."""


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """What an item needs."""

    model: str
    fields: frozenset[str]
    exclude: Mapping[str, str] = field(default_factory=dict)
    """Addresses of workers that must not take it, and why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a placement saw it; `excluded_by` names the filter, '' when none excluded it."""

    worker: WorkerSnapshot
    score: float
    excluded_by: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement and its reasons."""

    policy: str
    chosen: WorkerSnapshot
    candidates: tuple[Candidate, ...]


Score = Callable[[WorkerSnapshot], float]
"""Predicted cost; the lowest wins, and of equals the one whose last turn is longest ago."""

POLICIES: dict[str, Score] = {
    "round_robin": lambda _: 0.0,
    "least_loaded": lambda worker: float(worker.sequences),
}


def place(policy: str, fleet: Sequence[WorkerSnapshot], query: PlacementQuery) -> Decision:
    """The worker for an item. Raises NoWorker or UnsupportedField when there is none."""
    score = POLICIES[policy]
    candidates = tuple(
        Candidate(worker, score(worker), _excluded_by(worker, query)) for worker in fleet
    )
    eligible = [candidate for candidate in candidates if not candidate.excluded_by]
    if not eligible:
        raise _refusal(candidates, query)
    chosen = min(
        eligible, key=lambda candidate: (candidate.score, candidate.worker.last_turn)
    ).worker
    return Decision(policy, chosen, candidates)


def _excluded_by(worker: WorkerSnapshot, query: PlacementQuery) -> str:
    if worker.problem:
        return worker.problem
    if worker.address in query.exclude:
        return query.exclude[worker.address]
    if worker.model != query.model:
        return f"serves model {worker.model}"
    missing = query.fields - worker.supported_fields
    return f"does not support {', '.join(sorted(missing))}" if missing else ""


def _refusal(candidates: Sequence[Candidate], query: PlacementQuery) -> TrtmeshError:
    able = [
        c
        for c in candidates
        if not c.worker.problem
        and c.worker.model == query.model
        and c.worker.address not in query.exclude
    ]
    if able:
        fields = ", ".join(sorted(query.fields - able[0].worker.supported_fields))
        return UnsupportedField(
            f"{fields} not supported by any worker of model {query.model}; leave the field unset"
        )
    reasons = "; ".join(
        f"{c.worker.worker or c.worker.address}: {c.excluded_by}" for c in candidates
    )
    return NoWorker(
        f"no worker of model {query.model} is ready ({reasons or 'none is known'}); try again later",
        retry_after_ms=1000,
    )
