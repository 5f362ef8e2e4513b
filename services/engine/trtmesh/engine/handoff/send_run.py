"""A sender's lease at work: feeds the machine in send_machine.py, and carries out the actions."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from trtmesh.chassis.errors import AlreadyExists
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import HandedOver, Offered, PartFinal, SequenceEnd
from trtmesh.engine.handoff.descriptor import shape_of
from trtmesh.engine.handoff.identity import PROTOCOL_VERSION
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem, failure
from trtmesh.engine.handoff.leases import LeaseOwner, LeaseTable, Timer
from trtmesh.engine.handoff.own_kv import OwnKv, OwnStates
from trtmesh.engine.handoff.parts import Part
from trtmesh.engine.handoff.send_machine import (
    AnnouncePart,
    AnySenderAction,
    AnySenderEvent,
    Commit,
    SenderAction,
    SenderEvent,
    SenderLease,
    SenderPhase,
    SendMark,
    StopSource,
    advance,
)
from trtmesh.v1 import generation_pb2
from trtmesh.v1 import kv_transfer_pb2 as pb

_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


class PeerFetch(Protocol):
    transport: pb.KvTransport.ValueType
    sent_bytes: int

    def put(self, action: AnySenderAction) -> None:
        """Sends a part, the commit mark, or, at the end of the fetch, the confirmation."""

    def abort(self) -> None:
        """Ends with an error."""


@dataclass(frozen=True, slots=True)
class SenderRequest:
    """A router's request for a lease of the KV of running sequences."""

    owner: LeaseOwner
    lease_id: str
    keys: Sequence[int]
    adapter: Adapter | None
    seconds: float
    is_for_client: bool = False
    """Leaves the lease to a client from the commit on, for `seconds`."""


class SentLease(ABC):
    """A granted lease of KV of this worker, from the submit to the outcome."""

    def __init__(
        self, own: OwnKv | OwnStates, table: LeaseTable[Self], asked: SenderRequest
    ) -> None:
        self.lease_id = asked.lease_id
        self.owner: LeaseOwner | None = asked.owner
        self.hash = own.hash(asked.adapter)
        self._backend, self._table = own.backend, table
        self._leader = asked.keys[0]
        self._live = list(asked.keys)
        """Sequences of the item without an end."""
        self._problem: Problem | None = None
        self._is_released = False
        self._lease = SenderLease()
        self._timer = Timer(asked.seconds, self._expire)
        table.grant(self)

    @property
    def outcome(self) -> Outcome | None:
        return self._lease.outcome

    @property
    def is_parked(self) -> bool:
        """Whether the KV is complete, and no receiver came in time."""
        return False

    @property
    def awaits_receiver(self) -> bool:
        """Whether the KV is complete, and a receiver fetches or may be connecting."""
        return self._lease.phase is SenderPhase.COMMITTED and not self.is_parked

    def renew(self, seconds: float) -> None:
        if self._lease.expires:
            self._timer.renew(seconds)

    def release(self, *, consumed: bool = False) -> None:
        """Ends the lease; `consumed` if the receiver generates."""
        self._feed(SenderEvent.CONSUMED if consumed else SenderEvent.RELEASED)

    def fail(self) -> None:
        """Ends the lease after a defect, and the sequence with an error."""
        self.release()
        self._problem = Problem.COMPUTE
        # The defect may have ended the lease without this action.
        self._backend.drop(self.lease_id)

    def sequence_ended(self, end: SequenceEnd) -> pb.HandoffDescriptor | None:
        """Completes the end of a sequence; returns the descriptor after a handoff."""
        self._live.remove(end.key)
        if end.reason == generation_pb2.FINISH_REASON_HANDOFF:
            if descriptor := self._descriptor_after(end):
                return descriptor
            # The lease ended during the step, or the KV cannot leave.
            end.reason = _CANCELLED
            self._problem = self._problem or (None if self._is_released else Problem.COMPUTE)
        if end.reason == _CANCELLED and self._problem:
            end.reason = generation_pb2.FINISH_REASON_ERROR
            end.error = failure(self._problem, self.lease_id)
        if end.key == self._leader:
            self._feed(SenderEvent.SEQUENCE_ENDED)
        return None

    @abstractmethod
    def _descriptor_after(self, end: SequenceEnd) -> pb.HandoffDescriptor | None:
        """Returns the descriptor of a sequence's KV after the handoff, or None if the lease has no KV."""

    @abstractmethod
    def _count(self, outcome: Outcome) -> None:
        """Counts the outcome, and the transfer so far."""

    def _expire(self) -> None:
        self._feed(SenderEvent.EXPIRED)

    def _feed(self, event: AnySenderEvent) -> None:
        before = self._lease.outcome
        self._lease, actions = advance(self._lease, event)
        if before is None and self._lease.outcome:
            self._end(self._lease.outcome)
        for action in actions:
            self._carry_out(action)

    def _end(self, outcome: Outcome) -> None:
        self._timer.cancel()
        self._count(outcome)
        self._table.forget(self)
        if self.owner:
            self.owner.owes_less()

    def _carry_out(self, action: AnySenderAction) -> None:
        match action:
            case StopSource(problem):
                self._problem, self._is_released = problem, problem is None
                self._backend.stop(self._live, _CANCELLED)
                self._backend.drop(self.lease_id)
            case SenderAction.FREE_KV:
                self._backend.drop(self.lease_id)


class SentBlocks(SentLease):
    """A lease of blocks for a receiver to fetch."""

    def __init__(self, own: OwnKv, table: LeaseTable[Self], asked: SenderRequest) -> None:
        self.parts: list[Part] = []
        self.blocks: tuple[int, ...] = ()
        self._own, self._asked = own, asked
        self._tokens = 0
        self._handed_over: HandedOver | None = None
        self._fetch: PeerFetch | None = None
        self._fetch_began = 0.0
        self._dial_timer: Timer | None = None
        """Runs from the commit until a receiver would have connected."""
        self._is_parked = False
        super().__init__(own, table, asked)

    @property
    def is_parked(self) -> bool:
        return self._is_parked and not self._lease.is_fetched

    def offered(self, news: Offered) -> None:
        """The sequence starts: a fetch may begin."""
        if self._lease.phase is SenderPhase.COMPUTING and self.owner:
            self._leader, self.blocks, self._tokens = news.key, news.blocks, news.tokens
            self.owner.tell_offered(news.key, self._descriptor())

    def part_final(self, news: PartFinal) -> None:
        if self._lease.phase is SenderPhase.COMPUTING:
            part = Part(news.first_block, news.blocks, news.first_layer, news.layers)
            self.parts.append(part)
            self._feed(SenderEvent.PART_COMPUTED)

    def handed_over(self, news: HandedOver) -> None:
        """The blocks belong to the lease."""
        self.blocks, self._tokens, self._handed_over = news.blocks, news.content.tokens, news
        if self._asked.is_for_client:
            self._table.disown(self)
            self._timer.renew(self._asked.seconds)
        self._feed(Commit(CommitMark(len(self.parts), news.content)))
        self._dial_timer = Timer(self._own.limits.dial_seconds, self._park)

    def _descriptor_after(self, end: SequenceEnd) -> pb.HandoffDescriptor | None:
        return self._descriptor() if self._handed_over else None

    def open_fetch(self, fetch: PeerFetch) -> None:
        """Starts the only fetch. Raises AlreadyExists for another."""
        self._lease, actions = advance(self._lease, SenderEvent.FETCH_OPENED)
        if SenderAction.REFUSE_FETCH in actions:
            raise AlreadyExists(
                "names a lease that is fetched already", field="open.blocks", value=self.lease_id
            )
        self._fetch, self._fetch_began = fetch, time.monotonic()
        for action in actions:
            self._carry_out(action)

    def received(self) -> None:
        """The receiver has ended all reads."""
        self._feed(SenderEvent.RECEIVED)

    def fetch_ended(self) -> None:
        """The call of the fetch is over."""
        self._feed(SenderEvent.FETCH_LOST)
        self._fetch = None

    def _park(self) -> None:
        self._is_parked = True
        if self.owner:
            self.owner.owes_less()

    def _count(self, outcome: Outcome) -> None:
        if self._fetch is None:
            self._table.end(outcome, None)
        else:
            seconds = time.monotonic() - self._fetch_began
            self._table.end(outcome, self._fetch.transport, self._fetch.sent_bytes, seconds)

    def _end(self, outcome: Outcome) -> None:
        if self._dial_timer:
            self._dial_timer.cancel()
        super()._end(outcome)

    def _carry_out(self, action: AnySenderAction) -> None:
        fetch = self._fetch
        match action:
            case AnnouncePart() | SendMark() | SenderAction.SEND_CONFIRMED if fetch:
                fetch.put(action)
            case SenderAction.ABORT_FETCH if fetch:
                fetch.abort()
            case _:
                super()._carry_out(action)

    def _descriptor(self) -> pb.HandoffDescriptor:
        own, handed_over = self._own, self._handed_over
        shapes = [shape_of(shard) for shard in own.memory.shards]
        return pb.HandoffDescriptor(
            lease_id=self.lease_id,
            worker=own.worker,
            shape=shapes[0],
            shards=shapes,
            block_ids=self.blocks,
            computed_tokens=self._tokens,
            first_token_id=handed_over.last_token if handed_over else None,
            emitted_tokens=handed_over.emitted_tokens if handed_over else 0,
            expires_in_ms=round(self._timer.remaining_seconds * 1000),
            protocol_version=PROTOCOL_VERSION,
            compatibility_hash=self.hash,
            layers_per_part=own.layers_per_part,
            transports=[
                pb.KvTransportOffer(transport=kind, state=transport.offer() if transport else b"")
                for kind, transport in own.transports.items()
            ],
        )


class SentState(SentLease):
    """A lease of KV kept by the backend and moved by its library."""

    def __init__(self, own: OwnStates, table: LeaseTable[Self], asked: SenderRequest) -> None:
        self._own = own
        self._state_ends_at: float | None = None
        """The backend frees the KV at this time of the loop; None before the handoff."""
        super().__init__(own, table, asked)

    def renew(self, seconds: float) -> None:
        super().renew(min(seconds, self._state_seconds))

    def _descriptor_after(self, end: SequenceEnd) -> pb.HandoffDescriptor | None:
        state, end.handoff_state = end.handoff_state, None
        if state is None or not 0 < len(state.content) <= self._own.max_state_bytes:
            self._backend.drop(self.lease_id)
            return None
        self._feed(Commit())
        if not self.awaits_receiver:
            return None
        self._state_ends_at = asyncio.get_running_loop().time() + state.seconds
        self._timer.renew(min(self._timer.remaining_seconds, state.seconds))
        return pb.HandoffDescriptor(
            lease_id=self.lease_id,
            worker=self._own.worker,
            computed_tokens=end.prompt_tokens + end.generated_tokens - 1,
            emitted_tokens=end.generated_tokens,
            expires_in_ms=round(state.seconds * 1000),
            backend_state=state.content,
            protocol_version=PROTOCOL_VERSION,
            compatibility_hash=self.hash,
            transports=[pb.KvTransportOffer(transport=pb.KV_TRANSPORT_BACKEND)],
        )

    @property
    def _state_seconds(self) -> float:
        """Remaining time of the KV in the backend; no limit before the handoff."""
        if self._state_ends_at is None:
            return float("inf")
        return max(0.0, self._state_ends_at - asyncio.get_running_loop().time())

    def _count(self, outcome: Outcome) -> None:
        self._table.end(outcome, pb.KV_TRANSPORT_BACKEND)
