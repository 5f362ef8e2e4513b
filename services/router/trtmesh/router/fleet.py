"""The workers that a router knows."""

from __future__ import annotations

from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import Decision, PlacementQuery, place
from trtmesh.router.worker import Worker


class Fleet:
    """All workers by address."""

    def __init__(self, policy: str, metrics: RouterMetrics) -> None:
        self.policy = policy
        self.workers: dict[str, Worker] = {}
        self._metrics = metrics
        self._turn = 0

    @property
    def ready(self) -> bool:
        """Whether any worker takes items."""
        return any(worker.ready and not worker.mismatch for worker in self.workers.values())

    def models(self) -> frozenset[str]:
        """Models that the workers serve or, as long as the router knows them, served."""
        return frozenset(
            worker.engine.model for worker in self.workers.values() if worker.engine.model
        )

    def place(self, query: PlacementQuery) -> Worker:
        """The worker for an item; it counts as dispatched from now on. Raises NoWorker or UnsupportedField."""
        snapshot = [worker.snapshot() for worker in self.workers.values()]
        decision: Decision = place(self.policy, snapshot, query)
        worker = self.workers[decision.chosen.address]
        self._turn += 1
        worker.last_turn = self._turn
        self._metrics.placed[self.policy, worker.name] += 1
        return worker
