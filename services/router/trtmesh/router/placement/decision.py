"""Decisions, kept for operators as their inputs: scores and exclusions are recomputed on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.router.placement.adapters import adapter_seconds, takers_of
from trtmesh.router.placement.filters import exclusions, lift_cold
from trtmesh.router.placement.homes import order_of
from trtmesh.router.placement.policies import POLICIES
from trtmesh.router.placement.residency import Place
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot
from trtmesh.router.placement.split import Split


@dataclass(frozen=True, slots=True)
class CandidateAdapter:
    """The item's adapter on a worker."""

    place: Place | None
    seconds: float
    """Predicted time until the adapter is ready to run; part of the score."""
    order: int
    """Position in the adapter's order of workers, from 1; 0 before the worker reported slots."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker in a placement, with the reason of the exclusion or ''."""

    worker: WorkerSnapshot
    score: float
    cached_tokens: int
    excluded_by: str
    adapter: CandidateAdapter | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement with all inputs."""

    policy: str
    chosen: WorkerSnapshot
    """The worker that decodes."""
    query: PlacementQuery
    fleet: Sequence[WorkerSnapshot]
    split: Split | None = None
    """Whether another worker computes the prompt; None in a fleet without roles."""

    @property
    def prefill(self) -> WorkerSnapshot:
        """The worker that computes the prompt."""
        return self.split.pair.prefill if self.split and self.split.pair else self.chosen

    @property
    def excluded_by(self) -> list[str]:
        """Reason of each worker's exclusion, or ''."""
        return exclusions(self.fleet, self.query)

    @property
    def scores(self) -> list[float]:
        """Score of each worker, even if excluded or not sampled."""
        eligible = [index for index, why in enumerate(self.excluded_by) if not why]
        return POLICIES[self.policy].costs(lift_cold(self.fleet, eligible), self.query)

    @property
    def candidates(self) -> list[Candidate]:
        """Every worker of the fleet."""
        cached = self.query.cached_tokens
        return [
            Candidate(worker, score, cached.get(worker.address, 0), why, self._adapter_on(worker))
            for worker, score, why in zip(self.fleet, self.scores, self.excluded_by, strict=True)
        ]

    def _adapter_on(self, worker: WorkerSnapshot) -> CandidateAdapter | None:
        need = self.query.adapter
        if need is None:
            return None
        takers = takers_of(self.fleet, self.query.model)
        order = order_of(takers, need.adapter.id, need.outlook.stretch)
        position = order.index(worker.address) + 1 if worker.address in order else 0
        return CandidateAdapter(
            worker.adapters.place(need), adapter_seconds(worker, need), position
        )

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens with reusable KV on the worker that computes the prompt."""
        return self.query.cached_tokens.get(self.prefill.address, 0)

    @property
    def regret_tokens(self) -> int:
        """Further prompt tokens reusable on another worker."""
        return max(self.query.cached_tokens.values(), default=0) - self.cached_tokens


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """A decision with the item. `cause` is first, retry or migration."""

    owner: str
    request_id: str
    batch_index: int
    cause: str
    decision: Decision


class DecisionLog:
    """A ring of records. Simultaneous decisions share snapshots, so a record costs a few bytes per worker."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._records: deque[DecisionRecord] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: DecisionRecord) -> None:
        self._records.append(record)

    def of_request(self, request_id: str) -> list[DecisionRecord]:
        """Decisions for the items of a request, in order; empty once forgotten."""
        return [record for record in self._records if record.request_id == request_id]
