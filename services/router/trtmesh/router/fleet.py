"""The workers that a router knows."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.placement import Decision, PlacementQuery, place
from trtmesh.router.worker import Worker
from trtmesh.v1 import router_admin_pb2 as admin_pb


@dataclass(frozen=True, slots=True)
class Identity:
    """What two workers must share so that one goes on where the other stopped; '' is what a worker does not tell."""

    model_fingerprint: str
    tokenizer_fingerprint: str

    @classmethod
    def of(cls, worker: Worker) -> Identity:
        return cls(worker.engine.model_fingerprint, worker.engine.tokenizer_fingerprint)

    def fits(self, other: Identity) -> bool:
        return _equal(self.model_fingerprint, other.model_fingerprint) and _equal(
            self.tokenizer_fingerprint, other.tokenizer_fingerprint
        )


def _equal(one: str, other: str) -> bool:
    return not one or not other or one == other


class Fleet:
    """All workers by address."""

    def __init__(self, policy: str, metrics: RouterMetrics) -> None:
        self.policy = policy
        self.workers: dict[str, Worker] = {}
        self._metrics = metrics
        self._turn = 0
        self._change = asyncio.Event()

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

    @property
    def hopeful(self) -> bool:
        """Whether waiting for a worker makes sense: some may become ready without anybody's doing."""
        refused = admin_pb.WORKER_STATE_REFUSED
        return any(w.state != refused and not w.mismatch for w in self.workers.values())

    def others_than(self, identity: Identity) -> Collection[str]:
        """Addresses of workers that would not go on as a worker of `identity` does."""
        return [a for a, worker in self.workers.items() if not identity.fits(Identity.of(worker))]

    def changed(self) -> None:
        """A worker may take now what none took before."""
        self._change.set()
        self._change = asyncio.Event()

    async def change(self, seconds: float) -> None:
        """Returns when something changed, or after so many seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._change.wait()
