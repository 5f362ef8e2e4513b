"""Handoffs by states: the backend's library moves the KV, and the mesh carries an opaque state and accounts for it.

A sender's lease lasts from the submit to the router's word that the receiver generates, a receiver's from the submit to
its first token. The sender's backend keeps the KV for `expires_in_ms` at most; `drop` frees it earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from hashlib import blake2b

from trtmesh.chassis.errors import HandoffFailed, InvalidField
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import (
    MAX_STATE_BYTES,
    Backend,
    HandoffState,
    SequenceEnd,
    StateKind,
)
from trtmesh.engine.handoff import state_sender
from trtmesh.engine.handoff.failures import failure, unknown
from trtmesh.engine.handoff.identity import DIGEST_BYTES, PROTOCOL_VERSION
from trtmesh.engine.handoff.lease import Outcome, Problem
from trtmesh.engine.handoff.leases import LeaseOwner, LeaseTable, Timer
from trtmesh.engine.handoff.metrics import HandoffMetrics
from trtmesh.engine.handoff.settings import HandoffSettings
from trtmesh.v1 import generation_pb2
from trtmesh.v1 import kv_transfer_pb2 as pb

_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED
_ERROR = generation_pb2.FINISH_REASON_ERROR
_HANDOFF = generation_pb2.FINISH_REASON_HANDOFF


@dataclass(frozen=True, slots=True)
class OwnStates:
    """A worker that hands over by states of its backend."""

    worker: str
    settings: HandoffSettings
    backend: Backend
    kind: StateKind
    model_fingerprint: str
    tokenizer_fingerprint: str
    max_message_bytes: int

    @property
    def max_state_bytes(self) -> int:
        """Most bytes of a state that travels: a message to the router holds more than the state."""
        return min(MAX_STATE_BYTES, self.max_message_bytes // 4)

    def hash(self, adapter: Adapter | None) -> bytes:
        """The compatibility hash of an item."""
        of_adapter = None if adapter is None else (adapter.id, adapter.version)
        of_model = self.model_fingerprint, self.tokenizer_fingerprint
        fields = repr((PROTOCOL_VERSION, *astuple(self.kind), *of_model, of_adapter))
        return blake2b(fields.encode(), digest_size=DIGEST_BYTES).digest()

    def state_of(self, descriptor: pb.HandoffDescriptor, adapter: Adapter | None) -> bytes:
        """The state in a descriptor. Raises HandoffFailed for one of another kind, InvalidField."""
        if (
            descriptor.protocol_version != PROTOCOL_VERSION
            or descriptor.compatibility_hash != self.hash(adapter)
        ):
            raise HandoffFailed(
                f"is the state of worker {descriptor.worker}, whose protocol, backend, model or adapter is another;"
                " continue from the tokens",
                field="submit.handoff",
            )
        size = len(descriptor.backend_state)
        if not 0 < size <= MAX_STATE_BYTES:
            limit = f"above 0 and at most {MAX_STATE_BYTES} bytes"
            raise InvalidField.of("submit.handoff.backend_state", f"{size} bytes", limit)
        return descriptor.backend_state


class SentState:
    """A lease of KV that this worker computes, and its backend keeps, at work: feeds the machine in state_sender.py."""

    def __init__(
        self,
        own: OwnStates,
        table: LeaseTable[SentState],
        metrics: HandoffMetrics,
        lease_id: str,
        owner: LeaseOwner,
        key: int,
        own_hash: bytes,
        seconds: float,
    ) -> None:
        self.lease_id = lease_id
        self.owner: LeaseOwner | None = owner
        self._own, self._table, self._metrics = own, table, metrics
        self._lease = state_sender.StateLease()
        self._key = key
        self._hash = own_hash
        self._problem: Problem | None = None
        self._state_ends_at: float | None = None
        """The loop's time at which the backend frees the KV; None before the handoff."""
        self._timer = Timer(seconds, self._expire)
        table.grant(self)

    @property
    def outcome(self) -> Outcome | None:
        return self._lease.outcome

    @property
    def awaits_receiver(self) -> bool:
        """Whether the KV waits for a receiver, or is fetched."""
        return self._lease.phase is state_sender.Phase.KEPT

    def renew(self, seconds: float) -> None:
        if self._lease.expires:
            self._timer.renew(min(seconds, self._state_seconds))

    def release(self, *, consumed: bool = False) -> None:
        self._feed(state_sender.Release(consumed))

    def sequence_ended(self, end: SequenceEnd) -> pb.HandoffDescriptor | None:
        """Completes the end of the sequence; returns the descriptor of one handed over."""
        state, end.handoff_state = end.handoff_state, None
        if end.reason == _HANDOFF:
            can_travel = state is not None and self._may_travel(state)
            if not can_travel and self._lease.expires:
                self._problem = Problem.COMPUTE
            self._feed(state_sender.HandedOver(can_travel))
            if state is not None and self.awaits_receiver:
                return self._commit(end, state)
            end.reason = _CANCELLED
        else:
            self._feed(state_sender.SequenceEnded())
        if end.reason == _CANCELLED and self._problem:
            end.reason, end.error = _ERROR, failure(self._problem, self.lease_id)
        return None

    def _commit(self, end: SequenceEnd, state: HandoffState) -> pb.HandoffDescriptor:
        seconds = state.expires_in_ms / 1000
        self._state_ends_at = asyncio.get_running_loop().time() + seconds
        self._timer.renew(min(self._timer.remaining_ms / 1000, seconds))
        return pb.HandoffDescriptor(
            lease_id=self.lease_id,
            worker=self._own.worker,
            computed_tokens=end.prompt_tokens + end.generated_tokens - 1,
            emitted_tokens=end.generated_tokens,
            expires_in_ms=state.expires_in_ms,
            backend_state=state.content,
            protocol_version=PROTOCOL_VERSION,
            compatibility_hash=self._hash,
            transports=[pb.KvTransportOffer(transport=pb.KV_TRANSPORT_BACKEND)],
        )

    def _may_travel(self, state: HandoffState) -> bool:
        return 0 < len(state.content) <= self._own.max_state_bytes

    @property
    def _state_seconds(self) -> float:
        """Time for which the backend still keeps the KV; no limit before the handoff."""
        if self._state_ends_at is None:
            return float("inf")
        return max(0.0, self._state_ends_at - asyncio.get_running_loop().time())

    def _expire(self) -> None:
        self._problem = Problem.EXPIRED
        self._feed(state_sender.Expire())

    def _feed(self, event: state_sender.Event) -> None:
        before = self.outcome
        self._lease, actions = state_sender.advance(self._lease, event)
        if before is None and self.outcome:
            self._end(self.outcome)
        for action in actions:
            match action:
                case state_sender.Action.STOP_SEQUENCE:
                    self._own.backend.stop([self._key], _CANCELLED)
                case state_sender.Action.DROP:
                    self._own.backend.drop(self.lease_id)

    def _end(self, outcome: Outcome) -> None:
        self._timer.cancel()
        self._table.end(outcome)
        self._metrics.ended("sent", pb.KV_TRANSPORT_BACKEND, outcome, 0, None)
        owner = self.owner
        self._table.forget(self)
        if owner:
            owner.owes_less()


class ReceivedState:
    """A sequence that continues from a state, until its first token."""

    def __init__(
        self,
        table: LeaseTable[ReceivedState],
        metrics: HandoffMetrics,
        lease_id: str,
        owner: LeaseOwner,
    ) -> None:
        self.lease_id = lease_id
        self.owner: LeaseOwner | None = owner
        self.outcome: Outcome | None = None
        self._table, self._metrics = table, metrics
        table.grant(self)

    def continued(self) -> None:
        """The sequence has its first new token."""
        self._end(Outcome.CONSUMED)

    def sequence_ended(self, _end: SequenceEnd) -> None:
        """The sequence is over; without a token, its state was not used."""
        self._end(Outcome.RELEASED)

    def _end(self, outcome: Outcome) -> None:
        if self.outcome is not None:
            return
        self.outcome = outcome
        self._table.end(outcome)
        self._metrics.ended("received", pb.KV_TRANSPORT_BACKEND, outcome, 0, None)
        self._table.forget(self)


class StateHandoffs:
    """The leases of both sides. Used on the event loop's thread."""

    def __init__(self, own: OwnStates, metrics: HandoffMetrics) -> None:
        self.own = own
        limits = own.settings.max_leases, own.settings.max_leases_per_stream
        self.sent = LeaseTable[SentState](*limits)
        self.received = LeaseTable[ReceivedState](*limits)
        self._metrics = metrics

    def check_sender(self, owner: LeaseOwner, lease_id: str) -> None:
        """Claims the id of a sender's lease. Raises AlreadyExists and QueueFull."""
        self.sent.claim(lease_id, owner, "submit.sender_lease_id")

    def send(
        self,
        owner: LeaseOwner,
        lease_id: str,
        key: int,
        adapter: Adapter | None,
        seconds: float,
    ) -> SentState:
        """Grants a claimed lease for a sequence that the backend has."""
        digest = self.own.hash(adapter)
        return SentState(self.own, self.sent, self._metrics, lease_id, owner, key, digest, seconds)

    def check_receiver(self, owner: LeaseOwner, lease_id: str) -> None:
        """Claims the id of a state's lease: a state is used once. Raises AlreadyExists and QueueFull."""
        self.received.claim(lease_id, owner, "submit.handoff.lease_id")

    def receive(self, owner: LeaseOwner, lease_id: str) -> ReceivedState:
        """Grants a claimed lease for a sequence that the backend has."""
        return ReceivedState(self.received, self._metrics, lease_id, owner)

    def renew(self, owner: LeaseOwner, lease_ids: Sequence[str], seconds: float) -> None:
        """Renews a sender's leases of a stream; answers each that has ended, or is unknown."""
        for lease_id in lease_ids:
            lease = self.sent.get(lease_id)
            if lease and lease.owner is owner:
                lease.renew(seconds)
            else:
                tell = owner.tell_over if self.sent.had(lease_id) else owner.tell_failed
                tell(lease_id, unknown(lease_id, "renew_leases.lease_ids"))

    def release(self, lease_id: str, *, consumed: bool) -> None:
        """Releases a sender's lease; an unknown one is ignored."""
        if sent := self.sent.get(lease_id):
            sent.release(consumed=consumed)

    def stream_ended(self, owner: LeaseOwner) -> None:
        """Releases a stream's leases. The end of its sequences ends those of a receiver."""
        for sent in self.sent.of(owner):
            sent.release()

    def owes(self, owner: LeaseOwner) -> bool:
        """Whether receivers may still need KV of the stream's sequences."""
        return any(lease.awaits_receiver for lease in self.sent.of(owner))

    def close(self) -> None:
        """Releases all leases."""
        for sent in self.sent.all():
            sent.release()
