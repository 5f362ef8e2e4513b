"""The handoffs of a worker: takes the commands of routers and the news of the backend to their leases.

Backends with KV pools hand blocks over; receivers reserve and fetch the blocks. Others hand states over: the library
moves the KV, and the mesh carries and accounts for an opaque state. A sender's lease of a state lasts from the submit
to the router's word that the receiver generates, a receiver's from the submit to its first token.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from trtmesh.chassis.errors import Draining, QueueFull
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    Awaiting,
    HandedOver,
    HandoffNews,
    Offered,
    PartFinal,
    Reserved,
    Submission,
)
from trtmesh.engine.handoff.lease import unknown
from trtmesh.engine.handoff.leases import GrantedLease, LeaseOwner, LeaseTable
from trtmesh.engine.handoff.metrics import HandoffMetrics
from trtmesh.engine.handoff.own_kv import OwnKv, OwnStates
from trtmesh.engine.handoff.receive_run import ReceivedBlocks, ReceivedState
from trtmesh.engine.handoff.send_run import SenderRequest, SentBlocks, SentLease, SentState
from trtmesh.v1 import kv_transfer_pb2 as pb

log = logging.getLogger(__name__)

Lease = SentLease | ReceivedBlocks | ReceivedState

Own = TypeVar("Own", bound=OwnKv | OwnStates)
S = TypeVar("S", bound=SentLease)
R = TypeVar("R", bound=GrantedLease)


class Handoffs(ABC, Generic[Own, S, R]):
    """The leases of both sides. Used on the event loop's thread."""

    def __init__(self, own: Own, metrics: HandoffMetrics) -> None:
        self.own = own
        self.sent = LeaseTable[S]("sent", metrics, own.limits)
        self.received = LeaseTable[R]("received", metrics, own.limits)

    @abstractmethod
    def submit(self, item: Submission, asked: SenderRequest, state_lease_id: str) -> Lease | None:
        """Gives an item to the backend. Returns the item's lease: as `asked` if a receiver will continue the item, else
        the lease of the received KV or state. Raises TrtmeshError."""

    def renew(self, owner: LeaseOwner, lease_ids: Sequence[str], seconds: float) -> None:
        """Renews leases of a stream; answers for each ended or unknown lease."""
        for lease_id in lease_ids:
            if not self._renewed(owner, lease_id, seconds):
                had = self.sent.had(lease_id) or self.received.had(lease_id)
                tell = owner.tell_over if had else owner.tell_failed
                tell(lease_id, unknown(lease_id, "renew_leases.lease_ids"))

    def _renewed(self, owner: LeaseOwner, lease_id: str, seconds: float) -> bool:
        """Renews the leases of an id; returns whether any is held."""
        held = [
            lease
            for lease in (self.sent.get(lease_id), self.received.get(lease_id))
            if lease and lease.owner is owner and lease.outcome is None
        ]
        for lease in held:
            lease.renew(seconds)
        return bool(held)

    def release(self, lease_id: str, *, consumed: bool) -> None:
        """Releases a lease; ignores an unknown lease."""
        if sent := self.sent.get(lease_id):
            sent.release(consumed=consumed)

    def stream_ended(self, owner: LeaseOwner) -> None:
        """Releases the leases of a stream."""
        for sent in self.sent.of(owner):
            sent.release()

    def owes(self, owner: LeaseOwner) -> bool:
        """Whether receivers get KV of the stream's sequences, or may be connecting."""
        return any(lease.awaits_receiver for lease in self.sent.of(owner))

    def relieve(self) -> bool:
        """Releases the oldest parked lease, because others wait for blocks. Returns whether any was parked."""
        parked = next((lease for lease in self.sent.all() if lease.is_parked), None)
        if parked is None:
            return False
        log.info("lease %s is released, because others wait for blocks", parked.lease_id)
        parked.release()
        return True

    async def close(self) -> None:
        for sent in self.sent.all():
            sent.release()


class HandoffsByState(Handoffs[OwnStates, SentState, ReceivedState]):
    """The leases of a worker with a KV transport of the library's own."""

    def submit(self, item: Submission, asked: SenderRequest, state_lease_id: str) -> Lease | None:
        """A state is used once."""
        if item.sender_lease_id:
            self.sent.claim(asked.lease_id, asked.owner, "submit.sender_lease_id")
        elif item.handoff_state:
            self.received.claim(state_lease_id, asked.owner, "submit.handoff.lease_id")
        self.own.backend.submit(item)
        if item.sender_lease_id:
            return SentState(self.own, self.sent, asked)
        if item.handoff_state:
            return ReceivedState(self.received, state_lease_id, asked.owner)
        return None


@dataclass(slots=True)
class _Reservation:
    """A reservation without the backend's answer."""

    owner: LeaseOwner
    tokens: int
    block_hashes: Sequence[int]
    seconds: float
    is_released: bool = False


class HandoffsByBlocks(Handoffs[OwnKv, SentBlocks, ReceivedBlocks]):
    """The leases of a worker with KV pools."""

    def __init__(self, own: OwnKv, metrics: HandoffMetrics) -> None:
        super().__init__(own, metrics)
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

    def submit(self, item: Submission, asked: SenderRequest, state_lease_id: str) -> Lease | None:
        received = None
        if item.sender_lease_id:
            self.sent.claim(asked.lease_id, asked.owner, "submit.sender_lease_id")
        if item.receiver_lease_id:
            received = self.received.get(item.receiver_lease_id)
            if received is None:
                raise unknown(item.receiver_lease_id, "submit.receiver_lease_id")
            received.check_free()
        self.own.backend.submit(item)
        if received:
            received.submitted(item.keys)
            return received
        return SentBlocks(self.own, self.sent, asked) if item.sender_lease_id else None

    def hand_over(self, key: int, asked: SenderRequest) -> SentLease:
        """Starts the handoff of a running sequence. Raises TrtmeshError."""
        self.sent.claim(asked.lease_id, asked.owner, "submit.sender_lease_id")
        self.own.backend.hand_over(key, asked.lease_id)
        return SentBlocks(self.own, self.sent, asked)

    def _renewed(self, owner: LeaseOwner, lease_id: str, seconds: float) -> bool:
        waiting = self._reservations.get(lease_id)
        is_waiting = waiting is not None and waiting.owner is owner
        if waiting and is_waiting:
            waiting.seconds = seconds
        return super()._renewed(owner, lease_id, seconds) or is_waiting

    def release(self, lease_id: str, *, consumed: bool) -> None:
        if waiting := self._reservations.get(lease_id):
            waiting.is_released = True
        # The receiver alone reports consumed blocks.
        super().release(lease_id, consumed=False)
        if received := self.received.get(lease_id):
            received.release()

    def stream_ended(self, owner: LeaseOwner) -> None:
        for waiting in self._reservations.values():
            waiting.is_released |= waiting.owner is owner
        super().stream_ended(owner)
        for received in self.received.of(owner):
            received.release()

    # News of the backend.

    def take(self, news: HandoffNews) -> None:
        try:
            self._take(news)
        except Exception:
            # Broad on purpose: a defect of a lease must not cost the rest of the step.
            log.exception("unexpected error of lease %s", news.lease_id)
            self._fail(news.lease_id)

    def _take(self, news: HandoffNews) -> None:
        sent = self.sent.get(news.lease_id)
        match news:
            case Reserved():
                self._on_reserved(news)
            case Awaiting(lease_id):
                if received := self.received.get(lease_id):
                    received.awaiting(news)
            case Offered() if sent:
                sent.offered(news)
            case PartFinal() if sent:
                sent.part_final(news)
            case HandedOver() if sent:
                sent.handed_over(news)
            case HandedOver():
                # The lease ended during the step.
                self.own.backend.drop(news.lease_id)

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
        received = ReceivedBlocks(
            self.own, self.received, self._spawn, news, waiting.owner, waiting.seconds
        )
        if waiting.is_released:
            received.release()
        else:
            waiting.owner.tell_reserved(news.lease_id, news.present_tokens, None)

    def _answered(self, lease_id: str) -> _Reservation:
        waiting = self._reservations.pop(lease_id)
        self.received.expect_less(waiting.owner)
        return waiting

    # Life of the worker.

    async def close(self) -> None:
        """Releases all leases, and waits for their fetches and reads."""
        await super().close()
        for received in self.received.all():
            received.release()
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
                f" {most}; use another worker",
                value=str(held),
                limit=f"at most {most}",
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
