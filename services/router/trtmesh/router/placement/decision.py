"""What was decided, in a form that costs little to make: the reasons follow from what it was decided from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trtmesh.router.placement.filters import exclusions, lift_cold
from trtmesh.router.placement.policies import POLICIES
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
    """A placement and what it was decided from."""

    policy: str
    chosen: WorkerSnapshot
    query: PlacementQuery
    fleet: Sequence[WorkerSnapshot]

    @property
    def excluded_by(self) -> list[str]:
        """Why each worker of the fleet was not considered; '' where it was."""
        return exclusions(self.fleet, self.query)

    @property
    def scores(self) -> list[float]:
        """The score of each worker of the fleet, those that were not considered or not drawn included."""
        eligible = [index for index, why in enumerate(self.excluded_by) if not why]
        return POLICIES[self.policy].costs(lift_cold(self.fleet, eligible), self.query)

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
