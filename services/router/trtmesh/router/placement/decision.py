"""What was decided, with the reasons, in a form that costs little to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a placement saw it; `excluded_by` says why it was not considered, '' when it was."""

    worker: WorkerSnapshot
    score: float
    cached_tokens: int
    excluded_by: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A placement and its reasons; `scores` and `excluded_by` are parallel to `fleet`."""

    policy: str
    chosen: WorkerSnapshot
    query: PlacementQuery
    fleet: Sequence[WorkerSnapshot]
    scores: Sequence[float]
    excluded_by: Sequence[str]

    @property
    def candidates(self) -> list[Candidate]:
        """Every worker that was looked at."""
        cached = self.query.cached_tokens
        return [
            Candidate(worker, score, cached.get(worker.address, 0), why)
            for worker, score, why in zip(self.fleet, self.scores, self.excluded_by, strict=True)
        ]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV the chosen worker was thought to have."""
        return self.query.cached_tokens.get(self.chosen.address, 0)

    @property
    def regret_tokens(self) -> int:
        """Prompt tokens that another worker could have reused beyond those."""
        return max(self.query.cached_tokens.values(), default=0) - self.cached_tokens
