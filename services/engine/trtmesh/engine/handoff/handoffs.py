"""The handoffs of a worker: takes the commands of routers and the news of the backend to their leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import Draining, QueueFull
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    Awaiting,
    HandedOver,
    HandoffNews,
    Offered,
    PartFinal,
    Reserved,
)
from trtmesh.engine.handoff.failures import unknown
from trtmesh.engine.handoff.leases import LeaseOwner, LeaseTable
from trtmesh.engine.handoff.metrics import HandoffMetrics
from trtmesh.engine.handoff.own_kv import OwnKv
from trtmesh.engine.handoff.received import ReceivedHandoff
from trtmesh.engine.handoff.sent import SentHandoff
from trtmesh.v1 import kv_transfer_pb2 as pb

log = logging.getLogger(__name__)


def _release_all(leases: Sequence[SentHandoff] | Sequence[ReceivedHandoff]) -> None:
    for lease in leases:
        lease.release()


@dataclass(slots=True)
class _Reservation:
    """A reservation without the backend's answer."""

    owner: LeaseOwner
    tokens: int
    block_hashes: Sequence[int]
    seconds: float
    is_released: bool = False


class Handoffs:
    """The leases of both sides. Used on the event loop's thread."""

    def __init__(self, own: OwnKv, metrics: HandoffMetrics) -> None:
        self.own = own
        limits = own.settings.max_leases, own.settings.max_leases_per_stream
        self.sent = LeaseTable[SentHandoff](*limits)
        self.received = LeaseTable[ReceivedHandoff](*limits)
        self._metrics = metrics
        self._reservations: dict[str, _Reservation] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # Commands of routers.

    def reserve(
        self,
        owner: LeaseOwner,
        lease_id: str,
        tokens: int,
        block_hashes: Sequence[int],
        seconds: float,
    ) -> None:
        """Asks the backend for blocks. Raises AlreadyExists, Draining and QueueFull."""
        if self.own.is_draining():
            raise Draining(f"worker {self.own.worker} is draining; use another worker")
        self._check_quarantine()
        self.received.claim(lease_id, owner, "reserve_blocks.lease_id")
        self.received.expect(owner)
        self._reservations[lease_id] = _Reservation(owner, tokens, block_hashes, seconds)
        self._ask(lease_id)

    def _ask(self, lease_id: str) -> None:
        waiting = self._reservations[lease_id]
        try:
            self.own.backend.reserve(lease_id, waiting.tokens, waiting.block_hashes)
        except BaseException:
            self._answered(lease_id)
            raise

    def attach(
        self, lease_id: str, descriptor: pb.HandoffDescriptor, adapter: Adapter | None
    ) -> None:
        """Names the sender of a reservation. Raises HandoffFailed for an unknown lease."""
        received = self.received.get(lease_id)
        if received is None:
            raise unknown(lease_id, "attach_sender.lease_id")
        received.attach(descriptor, self.own.hash(adapter))

    def check_sender(self, owner: LeaseOwner, lease_id: str) -> None:
        """Claims the id of a sender's lease. Raises AlreadyExists and QueueFull."""
        self.sent.claim(lease_id, owner, "submit.sender_lease_id")

    def send(
        self,
        owner: LeaseOwner,
        lease_id: str,
        keys: Sequence[int],
        adapter: Adapter | None,
        seconds: float,
        *,
        is_for_client: bool = False,
    ) -> SentHandoff:
        """Grants a claimed lease for sequences that the backend has."""
        own, metrics, digest = self.own, self._metrics, self.own.hash(adapter)
        return SentHandoff(
            own,
            self.sent,
            metrics,
            lease_id,
            owner,
            keys,
            digest,
            seconds,
            is_for_client=is_for_client,
        )

    def reserved_for(self, lease_id: str) -> ReceivedHandoff:
        """The lease of a reservation for a submit. Raises HandoffFailed if it has ended, or has a sequence."""
        received = self.received.get(lease_id)
        if received is None:
            raise unknown(lease_id, "submit.receiver_lease_id")
        received.check_free()
        return received

    def renew(self, owner: LeaseOwner, lease_ids: Sequence[str], seconds: float) -> None:
        """Renews leases of a stream; answers each that has ended, or is unknown."""
        for lease_id in lease_ids:
            held = [
                lease
                for lease in (self.sent.get(lease_id), self.received.get(lease_id))
                if lease and lease.owner is owner and lease.outcome is None
            ]
            for lease in held:
                lease.renew(seconds)
            waiting = self._reservations.get(lease_id)
            if waiting and waiting.owner is owner:
                waiting.seconds = seconds
            elif not held:
                had = self.sent.had(lease_id) or self.received.had(lease_id)
                tell = owner.tell_over if had else owner.tell_failed
                tell(lease_id, unknown(lease_id, "renew_leases.lease_ids"))

    def release(self, lease_id: str) -> None:
        """Releases a lease of either side; an unknown one is ignored."""
        if waiting := self._reservations.get(lease_id):
            waiting.is_released = True
        if sent := self.sent.get(lease_id):
            sent.release()
        if received := self.received.get(lease_id):
            received.release()

    def stream_ended(self, owner: LeaseOwner) -> None:
        """Releases the leases of a stream."""
        for waiting in self._reservations.values():
            waiting.is_released |= waiting.owner is owner
        _release_all(self.sent.of(owner))
        _release_all(self.received.of(owner))

    def relieve(self) -> bool:
        """Releases the oldest parked lease, because others wait for blocks; False without any."""
        parked = next((lease for lease in self.sent.all() if lease.is_parked), None)
        if parked is None:
            return False
        log.info("lease %s is released, because others wait for blocks", parked.lease_id)
        parked.release()
        return True

    # News of the backend.

    def take(self, news: HandoffNews) -> None:
        try:
            self._take(news)
        except Exception:
            # Broad on purpose: a defect of one lease must not cost the rest of the step.
            log.exception("unexpected error of lease %s", news.lease_id)
            self._fail(news.lease_id)

    def _take(self, news: HandoffNews) -> None:
        match news:
            case Reserved():
                self._on_reserved(news)
            case Offered() | PartFinal() | HandedOver():
                self._on_sent(news)
            case Awaiting(lease_id):
                if received := self.received.get(lease_id):
                    received.awaiting(news)

    def _fail(self, lease_id: str) -> None:
        if lease := self.sent.get(lease_id) or self.received.get(lease_id):
            lease.fail()
        else:
            self.own.backend.drop(lease_id)

    def _on_reserved(self, news: Reserved) -> None:
        waiting = self._reservations[news.lease_id]
        if isinstance(news.error, QueueFull) and not waiting.is_released and self.relieve():
            self._ask(news.lease_id)
            return
        self._answered(news.lease_id)
        if news.error:
            if not waiting.is_released:
                waiting.owner.tell_reserved(news.lease_id, 0, news.error)
            return
        received = ReceivedHandoff(
            self.own,
            self.received,
            self._metrics,
            self._spawn,
            news,
            waiting.owner,
            waiting.seconds,
        )
        if waiting.is_released:
            received.release()
        else:
            waiting.owner.tell_reserved(news.lease_id, news.present_tokens, None)

    def _answered(self, lease_id: str) -> _Reservation:
        waiting = self._reservations.pop(lease_id)
        self.received.expect_less(waiting.owner)
        return waiting

    def _on_sent(self, news: Offered | PartFinal | HandedOver) -> None:
        sent = self.sent.get(news.lease_id)
        match news:
            case Offered() if sent:
                sent.offered(news)
            case PartFinal() if sent:
                sent.part_final(news)
            case HandedOver() if sent:
                sent.handed_over(news)
            case HandedOver():
                # The lease ended during the step.
                self.own.backend.drop(news.lease_id)

    # Life of the worker.

    def owes(self, owner: LeaseOwner) -> bool:
        """Whether receivers fetch KV of the stream's sequences, or may be connecting."""
        return any(lease.awaits_receiver for lease in self.sent.of(owner))

    async def close(self) -> None:
        """Releases all leases, and waits for their fetches and reads."""
        _release_all(self.sent.all())
        _release_all(self.received.all())
        while self._tasks:
            await asyncio.wait(self._tasks)
        for transport in self.own.transports.values():
            if transport:
                await transport.close()
        self.own.threads.shutdown(wait=False)

    def _check_quarantine(self) -> None:
        most = self.own.max_quarantined_blocks
        held = self.received.quarantined_blocks
        if held > most:
            raise QueueFull(
                f"{held} blocks of worker {self.own.worker} wait for reads of ended leases, more than"
                f" {most} (handoff.max_quarantined_fraction); use another worker",
                value=str(held),
                limit=f"at most {most}",
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
