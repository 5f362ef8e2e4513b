"""A live handoff: carries out the actions of `machine.py` on two workers, and reports what happens there."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trtmesh.chassis.errors import HandoffFailed, TrtmeshError
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.fleet.plan import Leg, Plan
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.handoffs import machine
from trtmesh.router.handoffs.machine import Action, Event, Handoff, Receiver, Sender
from trtmesh.router.kv_index import PromptBlocks
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.v1 import kv_transfer_pb2 as kv_pb

log = logging.getLogger(__name__)

LEASE_BYTES = 16
"""Random bytes of a lease id."""

LEASE_SECONDS = 10.0
"""Life of a lease unless it is renewed."""
CLIENT_LEASE_SECONDS = 60.0
"""Time for a client to bring back the state of a context_only item with generation_only."""
RENEWALS = 3
"""Renewals within the life of a lease."""

RESERVE_SECONDS = 2.0
"""Time for a worker to reserve blocks; afterwards the item is placed again."""
PREFILL_SECONDS = 60.0
"""Time from the reservation to the end of the prefill; afterwards the item migrates."""
TRANSFER_SECONDS = 30.0
"""Time from the end of the prefill to the next token; afterwards the item migrates."""

NEVER = float("inf")

MOVES = frozenset({"drain", "role", "rebalance"})
"""Causes of moves of running sequences."""


class HandoffOwner(Protocol):
    def start_prefill(self, handoff: LiveHandoff, leg: Leg) -> None:
        """Submits the item to the sender, with the lease. `leg` has the booking."""

    def submit_rest(self, handoff: LiveHandoff, leg: Leg) -> None:
        """Submits the handed over sequences to the receiver, with the lease. `leg` has the booking."""

    def on_handoff_over(self, handoff: LiveHandoff) -> None:
        """The handoff has a result. After a failure the sequences migrate, because of `handoff.error`."""


class EncodedPrompt(Protocol):
    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens."""

    @property
    def blocks(self) -> PromptBlocks:
        """The hashes of its blocks."""

    @property
    def identity(self) -> Adapter | None:
        """The adapter with its version."""


@dataclass(frozen=True, slots=True)
class HandoffItem:
    """The item of a handoff, as the workers need it."""

    request_id: str
    batch_index: int
    prompt: EncodedPrompt
    sequence_index: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """Leases of a submit: the sender's lease, for the handoff of the item, or the receiver's lease, with the KV."""

    sender: str = ""
    receiver: str = ""
    seconds: float = 0.0
    """Life of the sender's lease."""
    state: kv_pb.HandoffDescriptor | None = None
    """The descriptor with the state of the sender's backend, in place of a receiver's lease."""


NO_LEASE = Lease()


class LiveHandoff:
    """A handoff with its workers. All methods run on the event loop without waiting.

    Invariant: each booking of a leg is passed on once, to the submitted sequences, or released at the end.
    """

    def __init__(
        self,
        owner: HandoffOwner,
        item: HandoffItem,
        cause: str,
        on_over: Callable[[LiveHandoff], None],
        lease_id: str = "",
    ) -> None:
        self.lease_id = lease_id or secrets.token_hex(LEASE_BYTES)
        """The sender's lease, and the receiver's unless a parked sequence gets one."""
        self.receiver_lease_id = self.lease_id
        self.item = item
        self.cause = cause
        self.owner: HandoffOwner | None = owner
        self.state = Handoff()
        self.error: TrtmeshError | None = None
        """Why the handoff failed."""
        self.refused_by: Worker | None = None
        """The receiver if the handoff failed because it is full."""
        self.sender: Worker | None = None
        self.receiver: Worker | None = None
        self.tokens = 0
        """Tokens to hand over."""
        self.present_tokens = 0
        """Leading tokens that the receiver had already."""
        self.is_for_client = False
        """Whether a client brings the two halves together."""
        self.is_started = False
        """Whether the sender was asked for the handoff."""
        self.opened_at = self._stage_began = asyncio.get_running_loop().time()
        self.renewed_at = self.opened_at
        self.committed_at = 0.0
        """Time of the last sequence's end on the sender; 0 before."""
        self._on_over = on_over
        self._runs: list[SequenceRun] = []
        self._running: set[SequenceRun] = set()
        """Sequences of the sender before their handoff."""
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        """The legs with bookings not yet passed on."""
        self._descriptor: kv_pb.HandoffDescriptor | None = None

    def split(self, plan: Plan, tokens: int, runs: Sequence[SequenceRun]) -> None:
        """Begins with a reservation of `tokens` tokens at the last leg, then starts the prefill at the first, of `runs`
        or of a fresh item."""
        self._runs = [*runs]
        self._prefill = plan.first
        self._send_from(plan.first.worker)
        self._receive_at(plan.last, tokens)
        if plan.first.worker.capabilities.has_leases:
            self._follow(machine.begin())
        else:
            plan.last.worker.leases.expect_answers(self, self.lease_id)
            self._follow(machine.begin_by_state())

    def move(self, run: SequenceRun, sender: Worker, leg: Leg, tokens: int) -> None:
        """Begins to move a running sequence to `leg`."""
        sender.leases.moves += 1
        self._take_over(run, sender)
        self._receive_at(leg, tokens)
        self._follow(machine.begin())

    def park(self, run: SequenceRun, sender: Worker, tokens: int) -> None:
        """Stops a running sequence; its KV waits for `resume`."""
        self._take_over(run, sender)
        self.tokens = tokens
        self._follow(machine.park())

    def give(self, leg: Leg) -> None:
        """Begins with the prefill at `leg`. The KV waits for the client, who gets the descriptor."""
        self.is_for_client = True
        self._prefill = leg
        self._send_from(leg.worker)
        self._follow(machine.park())

    def given(self) -> None:
        """The client has the descriptor, and the sender's lease with it."""
        self._advance(Event.GIVEN)

    def adopt(
        self,
        runs: Sequence[SequenceRun],
        sender: Worker,
        descriptor: kv_pb.HandoffDescriptor,
        leg: Leg,
        tokens: int,
    ) -> None:
        """Continues `runs` at `leg` from the descriptor that a client brought."""
        self.is_for_client = self.is_started = True
        self._runs, self.sender, self._descriptor = [*runs], sender, descriptor
        self.receiver_lease_id = secrets.token_hex(LEASE_BYTES)
        self._receive_at(leg, tokens)
        self._follow(machine.adopt())

    def resume(self, leg: Leg, tokens: int) -> None:
        """Continues a parked sequence at `leg`."""
        # The receiver may be the sender.
        self.receiver_lease_id = secrets.token_hex(LEASE_BYTES)
        self._receive_at(leg, tokens)
        self._advance(Event.RESUMED)

    def _take_over(self, run: SequenceRun, sender: Worker) -> None:
        self._runs, self._running = [run], {run}
        self._send_from(sender)

    def _send_from(self, sender: Worker) -> None:
        self.sender = sender
        sender.leases.expect_answers(self, self.lease_id)

    def _receive_at(self, leg: Leg, tokens: int) -> None:
        self._decode, self.receiver, self.tokens = leg, leg.worker, tokens

    @property
    def backend_state(self) -> kv_pb.HandoffDescriptor | None:
        """Returns the descriptor for the receiver, sent with the sequence; None if the receiver has a lease."""
        return self._descriptor if self.state.by_state else None

    @property
    def runs(self) -> Sequence[SequenceRun]:
        """The handed over sequences; empty before the prefill."""
        return self._runs

    @property
    def is_parked(self) -> bool:
        """Whether the KV waits for the client, and nothing else is to be done."""
        return self.state.is_parked and self.state.sender is Sender.COMMITTED

    @property
    def was_parked(self) -> bool:
        """Whether the sequence left the worker because the client was paused, wherever the sequence is now."""
        return self.cause == "paused" and bool(self.committed_at)

    @property
    def sender_leaves(self) -> bool:
        """Whether a worker that leaves would wait for the client of a paused item."""
        waits = self.is_parked and not self.is_for_client
        return waits and self.sender is not None and not self.sender.stays

    @property
    def stage(self) -> str:
        """The stage, as the protocol names it."""
        if self.is_parked:
            return "parked"
        if self.state.receiver is Receiver.RESERVING:
            return "reserving"
        return "transferring" if self.state.sender is Sender.COMMITTED else "prefilling"

    @property
    def deadline(self) -> float:
        """End of the present stage, unless something happens."""
        return self._stage_began + self._stage_seconds

    @property
    def _stage_seconds(self) -> float:
        return {
            "reserving": RESERVE_SECONDS,
            "prefilling": PREFILL_SECONDS,
            "transferring": TRANSFER_SECONDS,
            "parked": NEVER,
        }[self.stage]

    @property
    def life_seconds(self) -> float:
        """Life of a lease, at most the longest of both workers."""
        is_fixed = self.is_for_client and self.receiver is None
        seconds = CLIENT_LEASE_SECONDS if is_fixed else LEASE_SECONDS
        workers = [worker for worker in (self.sender, self.receiver) if worker is not None]
        return min([seconds, *(worker.capabilities.max_lease_seconds for worker in workers)])

    def needs_renewal(self, now: float) -> bool:
        """Whether a third of the leases' life has passed since their last renewal."""
        return now >= self.renewed_at + self.life_seconds / RENEWALS

    def leases(self) -> list[tuple[Worker, str]]:
        """The leases to renew. A client's lease, from its commit on, has a fixed life."""
        is_clients = self.is_for_client and self.state.sender is Sender.COMMITTED
        sender = self.sender if self.is_started and not is_clients else None
        receiver = None if self.state.by_state else self.receiver
        sides = ((sender, self.lease_id), (receiver, self.receiver_lease_id))
        return [(worker, lease_id) for worker, lease_id in sides if worker is not None]

    # Events.

    def on_reserved(self, present_tokens: int) -> None:
        self.present_tokens = present_tokens
        self._advance(Event.RESERVED)

    def on_offered(self, descriptor: kv_pb.HandoffDescriptor) -> None:
        self._descriptor = descriptor
        self._advance(Event.OFFERED)

    def on_lease_ended(self, address: str, error: TrtmeshError) -> None:
        if self.is_for_client and self.receiver is None:
            # Before the handoff the end of the sequence reports the failure, too; afterwards the lease is the client's.
            return
        is_receiver = self.receiver is not None and address == self.receiver.address
        if is_receiver and self.state.receiver is Receiver.SUBMITTED:
            # The end of the sequence reports the failure, too.
            return
        self.fail(address, error)

    def on_handed_over(self, run: SequenceRun, descriptor: kv_pb.HandoffDescriptor | None) -> None:
        """A sequence ended on the sender with its handoff."""
        if descriptor is not None:
            self._descriptor, self.tokens = descriptor, descriptor.computed_tokens
        self._running.discard(run)
        if not self._running:
            self.committed_at = asyncio.get_running_loop().time()
            self._advance(Event.SENDER_COMMITTED)

    def on_settled(self) -> None:
        """A sequence ended for good, on either worker."""
        submitted = self.state.receiver is Receiver.SUBMITTED
        self._advance(Event.RECEIVER_STARTED if submitted else Event.SENDER_FINISHED)

    def fail(self, address: str, error: TrtmeshError, left: Sequence[SequenceRun] = ()) -> None:
        """The worker at `address` failed, or must be left. The item moves the sequences in `left` itself."""
        self._runs = [run for run in self._runs if run not in left]
        self.error = self.error or error
        is_receiver = self.receiver is not None and address == self.receiver.address
        if is_receiver and self.state.receiver is Receiver.RESERVING and error.row.back_pressure:
            self.refused_by = self.receiver
        self._advance(Event.RECEIVER_FAILED if is_receiver else Event.SENDER_FAILED)

    def cancel(self) -> None:
        """The item needs no handoff any more."""
        self._advance(Event.CANCELLED)

    def be_late(self) -> None:
        """The deadline of the stage passed."""
        self.error = HandoffFailed(
            f"the handoff of lease {self.lease_id} was {self.stage} for longer than {self._stage_seconds:g} s"
        )
        self._advance(Event.LATE)

    def _on_receiver_started(self, leg: Leg) -> None:
        """The receiver computed the first token, or its last sequence left."""
        if leg.booking.computed:
            self._advance(Event.RECEIVER_STARTED)

    # Actions.

    def _advance(self, event: Event) -> None:
        self._follow(machine.advance(self.state, event))

    def _follow(self, transition: machine.Transition) -> None:
        if self.state.result is not None:
            return
        stage = self.stage
        self.state, actions = transition
        if self.stage != stage:
            self._stage_began = asyncio.get_running_loop().time()
        for action in actions:
            self._carry_out(action)
        if self.state.result is not None:
            self._close()

    def _carry_out(self, action: Action) -> None:
        match action:
            case Action.RESERVE:
                self._reserve()
            case Action.START_SENDER:
                self._start_sender()
            case Action.ATTACH:
                self._attach()
            case Action.SUBMIT:
                self._submit()
            case Action.CONFIRM_SENDER | Action.RELEASE_SENDER:
                assert self.sender
                is_used = action is Action.CONFIRM_SENDER
                self.sender.leases.release(self.lease_id, consumed=is_used)
            case Action.RELEASE_RECEIVER:
                assert self.receiver
                self.receiver.leases.release(self.receiver_lease_id)
            case Action.MIGRATE:
                self._explain_failure()

    def _reserve(self) -> None:
        assert self.receiver
        able = self.receiver.capabilities
        size = able.tokens_per_block
        tokens = min(self.tokens, able.max_sequence_tokens)
        hashes = self.item.prompt.blocks.hashes(size)[: tokens // max(size, 1)]
        self.receiver.leases.reserve(
            self, self.receiver_lease_id, tokens, hashes, self.life_seconds
        )

    def _start_sender(self) -> None:
        assert self.owner
        assert self.sender
        self.is_started = True
        leg, self._prefill = self._prefill, None
        if leg is not None:
            self.owner.start_prefill(self, leg)
        for run in self._runs:
            if leg is None and run.assignment is not None:
                run.assignment.leave_kv(self.lease_id, self.life_seconds)

    def on_started(self, runs: Sequence[SequenceRun]) -> None:
        """The prefill of `runs` was submitted."""
        self._runs, self._running = [*runs], {*runs}

    def _attach(self) -> None:
        assert self._descriptor
        assert self.sender
        assert self.receiver
        command = kv_pb.AttachSenderCommand(
            lease_id=self.receiver_lease_id, descriptor=self._descriptor
        )
        command.descriptor.address = self.sender.address
        if (adapter := self.item.prompt.identity) is not None:
            command.adapter_id, command.adapter_version = adapter.id, adapter.version
        self.receiver.leases.attach(command)

    def _submit(self) -> None:
        assert self.owner
        assert self._decode
        leg, self._decode = self._decode, None
        leg.booking.when_computed.append(lambda: self._on_receiver_started(leg))
        self.owner.submit_rest(self, leg)

    def _explain_failure(self) -> None:
        self.error = self.error or HandoffFailed(f"the handoff of lease {self.lease_id} failed")
        with request_id_bound(self.item.request_id):
            log.info(
                "handoff %s (%s) of item %d failed: %s",
                self.lease_id,
                self.cause,
                self.item.batch_index,
                self.error.message,
            )

    def _close(self) -> None:
        """Gives unused bookings back, and drops later answers of the workers."""
        if (owner := self.owner) is None:
            return
        self.owner = None
        now = asyncio.get_running_loop().time()
        for leg in (self._prefill, self._decode):
            if leg is not None:
                leg.booking.release(now)
        self._prefill = self._decode = None
        if self.sender is not None:
            self.sender.leases.moves -= self.cause in MOVES
            self.sender.leases.forget(self.lease_id)
        if self.receiver is not None:
            self.receiver.leases.forget(self.receiver_lease_id)
        owner.on_handoff_over(self)
        self._on_over(self)
