"""A sender's lease at work: feeds the machine in sender.py, and carries out its actions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from trtmesh.chassis.errors import AlreadyExists
from trtmesh.engine.backend import HandedOver, Offered, PartFinal, SequenceEnd
from trtmesh.engine.handoff import sender
from trtmesh.engine.handoff.descriptor import shape_of
from trtmesh.engine.handoff.failures import failure
from trtmesh.engine.handoff.identity import PROTOCOL_VERSION
from trtmesh.engine.handoff.lease import CommitMark, Outcome, Problem
from trtmesh.engine.handoff.leases import LeaseOwner, LeaseTable, Timer
from trtmesh.engine.handoff.metrics import HandoffMetrics
from trtmesh.engine.handoff.own_kv import OwnKv
from trtmesh.engine.handoff.parts import Part
from trtmesh.v1 import generation_pb2
from trtmesh.v1 import kv_transfer_pb2 as pb

_CANCELLED = generation_pb2.FINISH_REASON_CANCELLED


class ServedFetch(Protocol):
    """A receiver's fetch."""

    transport: pb.KvTransport.ValueType
    sent_bytes: int

    def announce(self, part: int) -> None:
        """Announces a part, or sends it."""

    def send_mark(self, mark: CommitMark) -> None:
        """Sends the commit mark."""

    def confirm(self) -> None:
        """Sends the confirmation and ends."""

    def abort(self) -> None:
        """Ends with an error."""


class SentHandoff:
    """A granted lease of KV that this worker computes, from the submit to its outcome."""

    def __init__(
        self,
        own: OwnKv,
        table: LeaseTable[SentHandoff],
        metrics: HandoffMetrics,
        lease_id: str,
        owner: LeaseOwner,
        keys: Sequence[int],
        own_hash: bytes,
        seconds: float,
        *,
        is_for_client: bool = False,
    ) -> None:
        """`is_for_client` leaves the lease to a client from its commit on, for `seconds`."""
        self.lease_id = lease_id
        self.owner: LeaseOwner | None = owner
        self.hash = own_hash
        self.parts: list[Part] = []
        self.blocks: tuple[int, ...] = ()
        self._own, self._table, self._metrics = own, table, metrics
        self._leader = keys[0]
        self._live = list(keys)
        """Sequences of the item without an end."""
        self._tokens = 0
        self._handed_over: HandedOver | None = None
        self._is_for_client = is_for_client
        self._seconds = seconds
        self._problem: Problem | None = None
        self._is_released = False
        self._lease = sender.SenderLease()
        self._fetch: ServedFetch | None = None
        self._fetch_began = 0.0
        self._timer = Timer(seconds, self._expire)
        self._dial_timer: Timer | None = None
        """Runs from the commit until a receiver would have connected."""
        self._is_parked = False
        table.grant(self)

    @property
    def outcome(self) -> Outcome | None:
        return self._lease.outcome

    @property
    def awaits_receiver(self) -> bool:
        """Whether a receiver fetches the complete KV, or may be connecting."""
        return self._lease.phase is sender.Phase.COMMITTED and not self.is_parked

    @property
    def is_parked(self) -> bool:
        """Whether the KV is complete, and no receiver came for it in time."""
        return self._is_parked and self._lease.fetch is sender.FetchState.AWAITED

    def renew(self, seconds: float) -> None:
        if self._lease.expires:
            self._timer.renew(seconds)

    def release(self) -> None:
        self._feed(sender.Release())

    def fail(self) -> None:
        """Ends the lease after a defect, and its sequence with an error."""
        self.release()
        self._problem = Problem.COMPUTE
        # The defect may have ended the lease without this action.
        self._own.backend.drop(self.lease_id)

    def offered(self, news: Offered) -> None:
        """The sequence starts: a fetch may begin."""
        if self._lease.phase is sender.Phase.OFFERED and self.owner:
            self._leader, self.blocks, self._tokens = news.key, news.blocks, news.tokens
            self.owner.tell_offered(news.key, self._descriptor())

    def part_final(self, news: PartFinal) -> None:
        if self._lease.phase is sender.Phase.OFFERED:
            part = Part(news.first_block, news.blocks, news.first_layer, news.layers)
            self.parts.append(part)
            self._feed(sender.PartComputed())

    def handed_over(self, news: HandedOver) -> None:
        """The blocks belong to the lease."""
        if self._lease.phase is not sender.Phase.OFFERED:
            self._own.backend.drop(self.lease_id)
            return
        self.blocks, self._tokens, self._handed_over = news.blocks, news.content.tokens, news
        if self._is_for_client:
            self._table.disown(self)
            self._timer.renew(self._seconds)
        self._feed(sender.Commit(CommitMark(len(self.parts), news.content)))
        self._dial_timer = Timer(self._own.settings.dial_seconds, self._park)

    def sequence_ended(self, end: SequenceEnd) -> pb.HandoffDescriptor | None:
        """Completes the end of one of the sequences; returns the descriptor of one handed over."""
        self._live.remove(end.key)
        if end.reason == generation_pb2.FINISH_REASON_HANDOFF:
            if self._handed_over:
                return self._descriptor()
            # The lease ended during the step.
            end.reason = _CANCELLED
            self._problem = self._problem or (None if self._is_released else Problem.COMPUTE)
        if end.reason == _CANCELLED and self._problem:
            end.reason = generation_pb2.FINISH_REASON_ERROR
            end.error = failure(self._problem, self.lease_id)
        if end.key == self._leader:
            self._feed(sender.SequenceEnded())
        return None

    def open_fetch(self, fetch: ServedFetch) -> None:
        """Starts the one fetch. Raises AlreadyExists for another."""
        self._lease, actions = sender.advance(self._lease, sender.FetchOpened())
        if sender.RefuseFetch() in actions:
            raise AlreadyExists(
                "names a lease that is fetched already", field="open.blocks", value=self.lease_id
            )
        self._fetch, self._fetch_began = fetch, time.monotonic()
        for action in actions:
            self._carry_out(action)

    def received(self) -> None:
        """The receiver has ended its reads."""
        self._feed(sender.Received())

    def fetch_ended(self) -> None:
        """The call of the one fetch is over."""
        if self._lease.phase is not sender.Phase.CLOSED:
            self._feed(sender.FetchLost())
        self._fetch = None

    def _expire(self) -> None:
        self._feed(sender.Expire())

    def _park(self) -> None:
        self._is_parked = True
        if self.owner:
            self.owner.owes_less()

    def _feed(self, event: sender.Event) -> None:
        before = self._lease.outcome
        self._lease, actions = sender.advance(self._lease, event)
        if before is None and self._lease.outcome:
            self._end(self._lease.outcome)
        for action in actions:
            self._carry_out(action)

    def _end(self, outcome: Outcome) -> None:
        self._timer.cancel()
        if self._dial_timer:
            self._dial_timer.cancel()
        fetch, seconds = self._fetch, time.monotonic() - self._fetch_began
        size = fetch.sent_bytes if fetch else 0
        if fetch:
            self._table.transferred(size, seconds if outcome is Outcome.CONSUMED else 0.0)
        self._table.end(outcome)
        self._metrics.ended("sent", fetch.transport if fetch else None, outcome, size, seconds)
        owner = self.owner
        self._table.forget(self)
        if owner:
            owner.owes_less()

    def _carry_out(self, action: sender.Action) -> None:
        fetch = self._fetch
        match action:
            case sender.AnnouncePart(part) if fetch:
                fetch.announce(part)
            case sender.SendMark(mark) if fetch:
                fetch.send_mark(mark)
            case sender.SendConfirmed() if fetch:
                fetch.confirm()
            case sender.AbortFetch() if fetch:
                fetch.abort()
            case sender.EndSequence(problem):
                self._problem, self._is_released = problem, problem is None
                self._own.backend.stop(self._live, _CANCELLED)
                # The sequence may have been handed over in a step whose output is under way.
                self._own.backend.drop(self.lease_id)
            case sender.FreeBlocks():
                self._own.backend.drop(self.lease_id)

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
            expires_in_ms=self._timer.remaining_ms,
            protocol_version=PROTOCOL_VERSION,
            compatibility_hash=self.hash,
            layers_per_part=own.layers_per_part,
            transports=[
                pb.KvTransportOffer(transport=kind, state=transport.offer() if transport else b"")
                for kind, transport in own.transports.items()
            ],
        )
