"""The live handoffs of a router: renews their leases, ends late stages and counts results."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass

from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.handoffs.live_handoff import HandoffItem, HandoffOwner, LiveHandoff
from trtmesh.router.handoffs.machine import Result
from trtmesh.router.metrics import RouterMetrics

WAITING = frozenset({"paused", "context_only"})
"""Causes of handoffs whose KV waits for a client."""
RESUMED = frozenset({"paused", "generation_only"})
"""Causes of handoffs that go on when a client returns."""

MAX_PARKED = 256
"""Most leases of KV waiting for a client on workers: of paused sequences, and of context_only items until the second
half or the end of the lease. Beyond, sequences are computed again."""


@dataclass(frozen=True, slots=True)
class GivenKv:
    """KV whose state a client has, as far as this router knows: the second half may have come to another."""

    lease_id: str
    request_id: str
    batch_index: int
    sender: str
    """Name of the worker with the KV."""
    tokens: int
    opened_at: float
    ends_at: float


class HandoffTable:
    """All live handoffs by lease id."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics) -> None:
        self.fleet, self.metrics = fleet, metrics
        self.live: dict[str, LiveHandoff] = {}
        self._waiting = 0
        """Live handoffs that wait for a client."""
        self.given: dict[str, GivenKv] = {}
        """By lease id, unless the second half came to this router."""

    def open(
        self, owner: HandoffOwner, item: HandoffItem, cause: str, lease_id: str = ""
    ) -> LiveHandoff:
        """A handoff that is not begun, by default under a new lease."""
        handoff = LiveHandoff(owner, item, cause, self._on_over, lease_id)
        self.live[handoff.lease_id] = handoff
        self._waiting += cause in WAITING
        self.given.pop(lease_id, None)
        return handoff

    @property
    def may_park(self) -> bool:
        """Whether more KV may wait on a worker for a client."""
        return self._waiting + len(self.given) < MAX_PARKED

    def discard(self, sender: Worker, lease_id: str) -> None:
        """Ends a client's lease whose KV nothing continues from."""
        self.given.pop(lease_id, None)
        sender.leases.release(lease_id)

    def tick(self, now: float) -> None:
        """Ends late stages and parked KV of leaving workers, and renews the leases every third of their life."""
        for handoff in [*self.live.values()]:
            if now > handoff.deadline:
                handoff.be_late()
            elif handoff.sender_leaves:
                handoff.cancel()
        self._renew(now)
        for lease_id in [each for each, given in self.given.items() if given.ends_at <= now]:
            del self.given[lease_id]

    def _renew(self, now: float) -> None:
        by_worker: defaultdict[tuple[Worker, float], list[str]] = defaultdict(list)
        for handoff in self.live.values():
            if not handoff.needs_renewal(now):
                continue
            handoff.renewed_at = now
            for worker, lease_id in handoff.leases():
                by_worker[worker, handoff.life_seconds].append(lease_id)
        for (worker, life_seconds), lease_ids in by_worker.items():
            worker.leases.renew(lease_ids, life_seconds)

    def _on_over(self, handoff: LiveHandoff) -> None:
        del self.live[handoff.lease_id]
        self._waiting -= handoff.cause in WAITING
        result = handoff.state.result
        assert result is not None
        self.metrics.handoffs[handoff.cause, result.value] += 1
        if result is Result.GIVEN:
            self.given[handoff.lease_id] = _given_of(handoff)
        if result is Result.MOVED:
            self.metrics.handoff_tokens += max(0, handoff.tokens - handoff.present_tokens)
            self._note_duration(handoff)
        for worker in (handoff.sender, handoff.receiver):
            if worker is not None:
                worker.retry_migrations()

    def _note_duration(self, handoff: LiveHandoff) -> None:
        """Notes the time from the commit to the next token, unless a client took a part of it."""
        if handoff.cause in RESUMED:
            return
        seconds = asyncio.get_running_loop().time() - handoff.committed_at
        self.metrics.handoff.observe(seconds)
        if handoff.cause == "disaggregated" and handoff.receiver is not None:
            handoff.receiver.guard.rates.learn_handoff(seconds)


def _given_of(handoff: LiveHandoff) -> GivenKv:
    item = handoff.item
    return GivenKv(
        handoff.lease_id,
        item.request_id,
        item.batch_index,
        handoff.sender.name if handoff.sender else "",
        handoff.tokens,
        handoff.opened_at,
        handoff.committed_at + handoff.life_seconds,
    )
