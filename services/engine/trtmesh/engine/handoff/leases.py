"""The leases of one side of a worker: each is granted once, counted, and found by id."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from trtmesh.chassis.errors import AlreadyExists, QueueFull, TrtmeshError
from trtmesh.engine.handoff.lease import Outcome
from trtmesh.engine.handoff.metrics import HandoffMetrics
from trtmesh.engine.handoff.settings import HandoffLimits
from trtmesh.v1 import kv_transfer_pb2 as pb

REMEMBERED_IDS = 2**15
"""Ids of so many ended leases are remembered, to refuse a second use."""


class LeaseOwner(Protocol):
    """The stream of the router in charge of a handoff."""

    def tell_reserved(self, lease_id: str, present_tokens: int, error: TrtmeshError | None) -> None:
        """Answers a reservation."""

    def tell_offered(self, key: int, descriptor: pb.HandoffDescriptor) -> None:
        """Reports that a fetch of the sequence's KV may begin."""

    def tell_failed(self, lease_id: str, error: TrtmeshError) -> None:
        """Reports a lease without a sequence to end with."""

    def tell_over(self, lease_id: str, error: TrtmeshError) -> None:
        """Answers a renewal sent before the end of the lease was known: no error of this worker."""

    def owes_less(self) -> None:
        """Notes a sender's ended or parked lease."""


class Timer:
    """The remaining life of a lease. Lease and timer are a cycle until the end of the lease cancels the timer."""

    def __init__(self, seconds: float, expire: Callable[[], None]) -> None:
        self._expire: Callable[[], None] | None = expire
        self._handle: asyncio.TimerHandle | None = None
        self.renew(seconds)

    def renew(self, seconds: float) -> None:
        """The lease ends after `seconds`, unless the timer is cancelled."""
        self._stop()
        if self._expire:
            self._handle = asyncio.get_running_loop().call_later(seconds, self._expire)

    def cancel(self) -> None:
        """Ends the timer for good, and forgets the lease."""
        self._stop()
        self._expire = None

    def _stop(self) -> None:
        if self._handle:
            self._handle.cancel()
            self._handle = None

    @property
    def remaining_seconds(self) -> float:
        """Time until the lease ends."""
        if self._handle is None:
            return 0.0
        return max(0.0, self._handle.when() - asyncio.get_running_loop().time())


class GrantedLease(Protocol):
    lease_id: str
    owner: LeaseOwner | None

    def renew(self, seconds: float) -> None:
        """Lets the lease end after `seconds`, unless ended already."""

    @property
    def outcome(self) -> Outcome | None:
        """None while the lease is held."""


L = TypeVar("L", bound=GrantedLease)


class LeaseTable(Generic[L]):
    """Leases by id and by stream. A lease in quarantine has an outcome, and stays until the end of the last read."""

    def __init__(self, side: str, metrics: HandoffMetrics, limits: HandoffLimits) -> None:
        """`side` is `sent` or `received`."""
        self._side, self._metrics, self._limits = side, metrics, limits
        self._leases: dict[str, L] = {}
        self._of_owner: dict[LeaseOwner, dict[str, L]] = {}
        self._expected: Counter[LeaseOwner] = Counter()
        """Claimed ids before a grant or a refusal of the backend."""
        self._used_ids: dict[str, None] = {}
        self._granted = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._quarantined_blocks = 0
        self._bytes = 0
        self._transfer_seconds = 0.0

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, lease_id: str) -> L | None:
        return self._leases.get(lease_id)

    def had(self, lease_id: str) -> bool:
        """Whether a lease was granted here, or asked for."""
        return lease_id in self._used_ids

    def all(self) -> list[L]:
        return list(self._leases.values())

    def of(self, owner: LeaseOwner) -> list[L]:
        """The leases of a stream."""
        return list(self._of_owner.get(owner, {}).values())

    def claim(self, lease_id: str, owner: LeaseOwner, field: str) -> None:
        """Uses up an id. Raises AlreadyExists for a used id, QueueFull at a limit."""
        if lease_id in self._used_ids:
            raise AlreadyExists(
                "names a lease that was granted before; draw a new id", field=field, value=lease_id
            )
        of_all = len(self._leases) + self._expected.total()
        of_owner = len(self._of_owner.get(owner, ())) + self._expected[owner]
        for held, most, whose in (
            (of_all, self._limits.max_leases, "of all routers"),
            (of_owner, self._limits.max_leases_per_stream, "of this router"),
        ):
            if held >= most:
                raise QueueFull.of(most, f"{held} leases {whose} are held")
        self._used_ids[lease_id] = None
        while len(self._used_ids) > REMEMBERED_IDS + len(self._leases):
            oldest = next(iter(self._used_ids))
            del self._used_ids[oldest]
            if oldest in self._leases:
                self._used_ids[oldest] = None

    def expect(self, owner: LeaseOwner) -> None:
        """Counts a claimed id as a lease until the grant or refusal."""
        self._expected[owner] += 1

    def expect_less(self, owner: LeaseOwner) -> None:
        self._expected[owner] -= 1
        if not self._expected[owner]:
            del self._expected[owner]

    def grant(self, lease: L) -> None:
        """Adds a lease with a claimed id."""
        self._granted += 1
        self._leases[lease.lease_id] = lease
        assert lease.owner
        self._of_owner.setdefault(lease.owner, {})[lease.lease_id] = lease

    def disown(self, lease: GrantedLease) -> None:
        """Separates a lease from the stream. The lease outlives the stream."""
        if lease.owner:
            self._leave(lease.owner, lease.lease_id)
            lease.owner = None

    def end(
        self,
        outcome: Outcome,
        transport: pb.KvTransport.ValueType | None,
        size: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Counts the outcome of a lease, and the bytes and seconds of the transfer. `transport` is None without a
        fetch, `seconds` where the backend fetches."""
        self._outcomes[outcome] += 1
        self._bytes += size
        if outcome is Outcome.CONSUMED and seconds is not None:
            self._transfer_seconds += seconds
        self._metrics.ended(self._side, transport, outcome, size, seconds)

    def forget(self, lease: GrantedLease) -> None:
        """Removes a lease without blocks."""
        if self._leases.pop(lease.lease_id, None) and lease.owner:
            self._leave(lease.owner, lease.lease_id)

    @property
    def quarantined_blocks(self) -> int:
        """Blocks of ended leases; reads may still write there."""
        return self._quarantined_blocks

    def quarantine(self, blocks: int) -> None:
        """Counts blocks on entering quarantine; on leaving, `count` is negative."""
        self._quarantined_blocks += blocks

    def counts(self) -> pb.HandoffCounts:
        return pb.HandoffCounts(
            granted=self._granted,
            consumed=self._outcomes[Outcome.CONSUMED],
            released=self._outcomes[Outcome.RELEASED],
            expired=self._outcomes[Outcome.EXPIRED],
            # Counted, not computed: `granted` proves all leases accounted for.
            held=sum(lease.outcome is None for lease in self._leases.values()),
            bytes=self._bytes,
            transfer_ms=round(self._transfer_seconds * 1000),
        )

    def _leave(self, owner: LeaseOwner, lease_id: str) -> None:
        leases = self._of_owner[owner]
        del leases[lease_id]
        if not leases:
            del self._of_owner[owner]
