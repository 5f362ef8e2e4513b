"""The handoffs of an item: split plans, halves of clients, and sequences that leave their worker with their KV."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.fleet.assignments import Handle
from trtmesh.router.fleet.plan import Leg, Plan
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.handoffs.client_halves import second_half
from trtmesh.router.handoffs.live_handoff import (
    MOVES,
    NO_LEASE,
    EncodedPrompt,
    HandoffItem,
    Lease,
    LiveHandoff,
)
from trtmesh.router.handoffs.machine import Result
from trtmesh.router.handoffs.table import HandoffTable
from trtmesh.router.placement import Role
from trtmesh.router.streams.sequence import End, SequenceRun
from trtmesh.router.values.handoff_state import HandoffState
from trtmesh.router.values.request import ItemRequest
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb

MAX_MOVES = 8
"""Most running sequences handed over by a worker at once, during a drain or a change of the role. Each copies the KV,
and more would only slow all of them down."""

SLACK_TOKENS = 64
"""Most tokens that a running sequence gains before the stop for a handoff."""


class LiveItem(Protocol):
    """The item, as seen by the handoffs."""

    @property
    def encoded(self) -> EncodedPrompt:
        """The encoded prompt."""

    @property
    def sequences(self) -> Sequence[SequenceRun]:
        """All sequences; empty before the first dispatch."""

    def open_sequences(self) -> None:
        """Opens all sequences."""

    def submit(self, leg: Leg, runs: Sequence[SequenceRun], lease: Lease = NO_LEASE) -> None:
        """Submits sequences, or all of a fresh item. Raises TrtmeshError."""

    def place_receiver(
        self, runs: Sequence[SequenceRun], sender: Worker, *, stays: bool, receiver: str = ""
    ) -> Leg:
        """Books a leg for the rest of sequences, or of a fresh item, with the KV at `sender`; preferably there, if the
        sequences may stay, or at the `receiver` of a plan. Raises TrtmeshError."""

    def began_at(self, leg: Leg) -> None:
        """Notes the item's worker, and reports the start with the first."""

    def wake(self) -> None:
        """Wakes the item's task: a sequence may need a worker."""

    def fail(self, error: TrtmeshError) -> None:
        """Ends the item with an error from outside of its task."""


class Refusals(Protocol):
    """The item's placements, as its handoffs inform them."""

    may_hand_over: bool
    """Whether handoffs are tried: the first failure is the last."""

    def refused(self, address: str, error: TrtmeshError) -> None:
        """Leaves out the worker at `address`, which is full."""


class ItemHandoffs:
    """The live handoffs of an item, and their owner. A sequence has at most one."""

    def __init__(
        self,
        item: LiveItem,
        request: ItemRequest,
        request_id: str,
        model: str,
        table: HandoffTable,
        placer: Refusals,
        moved: Callable[[int, str, TrtmeshError | None], None],
    ) -> None:
        """`moved` takes the number of sequences that left their worker, the cause and the error, if any."""
        self._item = item
        self._request = request
        self._request_id, self._model = request_id, model
        self._table = table
        self._placer = placer
        self._moved = moved
        self._live: list[LiveHandoff] = []

    @property
    def awaits_prefill(self) -> bool:
        """Whether the blocks for a fresh item are being reserved."""
        return any(not handoff.runs for handoff in self._live)

    def holds(self, run: SequenceRun) -> bool:
        return self._of(run) is not None

    def without_worker(self, runs: list[SequenceRun]) -> list[SequenceRun]:
        """Returns the sequences of `runs` without a handoff to a worker."""
        if not self._live:
            return runs
        return [run for run in runs if (found := self._of(run)) is None or found.is_parked]

    # From the item's task.

    def split(self, plan: Plan, waiting: Sequence[SequenceRun]) -> None:
        """Begins the handoff of a split plan, for sequences or a fresh item."""
        generated = len(waiting[0].token_ids) if waiting else 0
        # Several sequences share the KV of all tokens but the last.
        tokens = (
            len(self._item.encoded.token_ids) + generated - (self._request.config.sequences > 1)
        )
        self._open("disaggregated").split(plan, tokens, waiting)

    def begin_half(self, plan: Plan, waiting: Sequence[SequenceRun]) -> None:
        """Dispatches a prefill whose KV waits for the client; without KV after a failure, or beyond the quota."""
        if any(run.token_ids for run in waiting):
            plan.release()
            for run in waiting:
                run.on_end(End(pb.FINISH_REASON_HANDOFF))
        elif (
            self._table.may_park
            and plan.first.worker.capabilities.has_leases
            and self._placer.may_hand_over
            and self._request.has_kv_to_share(len(self._item.encoded.token_ids))
        ):
            self._open("context_only").give(plan.first)
        else:
            self._item.submit(plan.first, waiting)

    def give(self) -> None:
        """The client has the descriptors of finished first halves."""
        for handoff in [*self._live]:
            handoff.given()

    def continue_half(self, state: HandoffState) -> None:
        """Begins with the KV brought by a client, if a worker may continue from the KV. Raises InvalidField."""
        item, lease_id = self._item, state.descriptor.lease_id
        half = second_half(self._table, self._model, self._request, state, item.encoded)
        if half is None or lease_id in self._table.live:
            return
        sender, descriptor = half
        try:
            leg = item.place_receiver((), sender, stays=True)
        except TrtmeshError:
            self._table.discard(sender, lease_id)
            return
        item.open_sequences()
        item.began_at(leg)
        for run in item.sequences:
            self._put_tokens(run, state.first_tokens)
        tokens = len(item.encoded.token_ids) + len(state.first_tokens) - (len(item.sequences) > 1)
        handoff = self._open("generation_only", lease_id=lease_id)
        handoff.adopt(item.sequences, sender, descriptor, leg, tokens)

    def _put_tokens(self, run: SequenceRun, token_ids: list[int]) -> None:
        """Puts tokens of the first half."""
        if not token_ids:
            return
        now = asyncio.get_running_loop().time()
        run.on_tokens(0, token_ids)
        run.times.on_tokens(len(token_ids), now, self._table.metrics.models[run.model])
        if run.charge is not None:
            run.charge.up_to(len(run.token_ids), now)

    def resume(self, waiting: Sequence[SequenceRun]) -> bool:
        """Reserves for parked sequences, preferably on the worker with their KV. Returns whether there are any."""
        parked = [(run, handoff) for run in waiting if (handoff := self._of(run)) is not None]
        for run, handoff in parked:
            self._resume(run, handoff)
        return bool(parked)

    def _resume(self, run: SequenceRun, handoff: LiveHandoff) -> None:
        assert handoff.sender
        try:
            leg = self._item.place_receiver([run], handoff.sender, stays=True)
        except TrtmeshError:
            handoff.cancel()
        else:
            handoff.resume(leg, self._tokens_of(run))

    def cancel(self) -> None:
        """Ends all handoffs with the item."""
        for handoff in [*self._live]:
            handoff.cancel()

    def dissolve(self) -> None:
        """Breaks the reference cycle with the item."""
        del self._item

    # From workers and the client.

    def park(self, runs: Sequence[SequenceRun]) -> list[SequenceRun]:
        """Has the workers stop sequences and keep the KV. Returns the sequences that leave without KV. A prefill that
        has not begun waits for the client."""
        for handoff in [*self._live]:
            if not handoff.runs:
                handoff.cancel()
        return [run for run in runs if not self._park(run)]

    def _park(self, run: SequenceRun) -> bool:
        if (handoff := self._of(run)) is not None:
            if handoff.state.is_parked:
                return True
            handoff.cancel()
            return run.assignment is None
        worker = self._table.fleet.workers.get(run.address)
        if run.assignment is None:
            return True
        if worker is None or not worker.ready or not self._keeps_kv(run, worker):
            return False
        # A paused item of several would hold a lease, and the blocks of all it generated, for each of them.
        if not self._table.may_park or not (self._request.config.sequences == 1 or run.moved):
            return False
        self._open("paused", run.sequence_index).park(run, worker, self._tokens_of(run))
        return True

    def hand_over(self, runs: Sequence[SequenceRun], address: str, cause: str) -> list[SequenceRun]:
        """Begins to move sequences with the KV. Returns the sequences that cannot move so."""
        return [run for run in runs if not self._hand_over(run, address, cause)]

    def _hand_over(self, run: SequenceRun, address: str, cause: str) -> bool:
        """Whether a sequence moves with its KV, now or after others of the worker."""
        if self._of(run) is not None:
            return True
        sender = self._table.fleet.workers.get(address)
        if sender is None or not self._keeps_kv(run, sender):
            return False
        return self.is_moving or sender.leases.moves >= MAX_MOVES or self._move(run, sender, cause)

    @property
    def is_moving(self) -> bool:
        """Whether a sequence moves now. Others of the item follow one by one, for they find the blocks of the prompt at
        the receiver."""
        return any(handoff.cause in MOVES for handoff in self._live)

    def may_move(self, run: SequenceRun) -> bool:
        """Whether a running sequence may leave its worker with its KV, and is not about to, nor has a second copy."""
        sender = self._table.fleet.workers.get(run.address)
        free = sender is not None and self._of(run) is None
        free = free and isinstance(run.assignment, Handle)
        return free and sender is not None and self._keeps_kv(run, sender)

    def move_to(self, run: SequenceRun, receiver: str) -> bool:
        """Begins to move a sequence with its KV to a certain worker; False if it stays."""
        sender = self._table.fleet.workers.get(run.address)
        if sender is None or not self.may_move(run) or sender.leases.moves >= MAX_MOVES:
            return False
        return self._move(run, sender, "rebalance", receiver)

    def _move(self, run: SequenceRun, sender: Worker, cause: str, receiver: str = "") -> bool:
        try:
            leg = self._item.place_receiver([run], sender, stays=False, receiver=receiver)
        except TrtmeshError:
            return False
        if cause == "role" and leg.worker.role is Role.PREFILL:
            leg.booking.release(asyncio.get_running_loop().time())
            return False
        tokens = self._tokens_of(run) + SLACK_TOKENS
        self._open(cause, run.sequence_index).move(run, sender, leg, tokens)
        return True

    def _keeps_kv(self, run: SequenceRun, sender: Worker) -> bool:
        """Whether a running sequence may leave with the KV."""
        if not (sender.capabilities.has_leases and self._placer.may_hand_over) or not run.token_ids:
            return False
        return not run.is_beam and not self._request.is_context_only

    def on_handed_over(self, run: SequenceRun, end: End) -> None:
        """Passes a sequence on to the receiver, or keeps the sequence for the return of the client."""
        if (handoff := self._of(run)) is not None:
            handoff.on_handed_over(run, end.handoff)
            if handoff.was_parked:
                self._moved(1, "paused", None)

    def on_settled(self, run: SequenceRun) -> None:
        if (handoff := self._of(run)) is None:
            return
        if run.ending is not None and run.ending.reason == pb.FINISH_REASON_HANDOFF:
            handoff.on_handed_over(run, run.ending.handoff)
        elif run.ending is not None and run.address:
            handoff.on_settled()
        else:
            handoff.cancel()

    def fail(self, runs: Sequence[SequenceRun], address: str, error: TrtmeshError) -> None:
        """Sequences lost the worker at `address`, or left it."""
        for run in runs:
            if (handoff := self._of(run)) is not None:
                handoff.fail(address, error, runs)

    # From the handoffs.

    def start_prefill(self, handoff: LiveHandoff, leg: Leg) -> None:
        """Dispatches the prefill, once the blocks for the rest are reserved."""
        lease = Lease(sender=handoff.lease_id, seconds=handoff.life_seconds)
        with self._failing(leg):
            self._item.submit(leg, handoff.runs, lease)
            handoff.on_started(handoff.runs or self._item.sequences)
        self._item.wake()

    def submit_rest(self, handoff: LiveHandoff, leg: Leg) -> None:
        """Dispatches the rest to the worker with the reservation, or with the state of the sender's backend."""
        if (state := handoff.backend_state) is not None:
            self._submit_with_state(handoff, leg, state)
            return
        with self._failing(leg):
            self._item.submit(leg, handoff.runs, Lease(receiver=handoff.receiver_lease_id))

    def _submit_with_state(
        self, handoff: LiveHandoff, leg: Leg, state: kv_pb.HandoffDescriptor
    ) -> None:
        """A state may be too large to travel with its item, which then goes on without."""
        try:
            self._item.submit(leg, handoff.runs, Lease(state=state))
        except TrtmeshError as error:
            leg.booking.release(asyncio.get_running_loop().time())
            handoff.fail(leg.worker.address, error)

    def on_handoff_over(self, handoff: LiveHandoff) -> None:
        """Places the sequences again after a failure."""
        self._live.remove(handoff)
        if handoff.state.result is Result.MIGRATED:
            self._on_failed(handoff)
        elif handoff.state.result is Result.MOVED and handoff.cause in MOVES:
            self._moved(1, handoff.cause, None)
        self._item.wake()

    def _on_failed(self, handoff: LiveHandoff) -> None:
        """Tries another receiver after a refusal, which cost nothing. After other failures the sequences migrate from
        their tokens, and nothing of the item is handed over again."""
        error, full = handoff.error, handoff.refused_by
        if full is not None and error is not None:
            self._placer.refused(full.address, error)
            if not handoff.is_started:
                return
        if handoff.is_started:
            if not handoff.was_parked:
                self._moved(len(handoff.runs), "handoff", error)
            for run in handoff.runs:
                run.leave_worker()
        self._placer.may_hand_over = False

    @contextmanager
    def _failing(self, leg: Leg) -> Iterator[None]:
        """Ends the item with an error of a dispatch outside its task."""
        try:
            yield
        except TrtmeshError as error:
            leg.booking.release(asyncio.get_running_loop().time())
            self._item.fail(error)

    def _open(self, cause: str, sequence_index: int = 0, lease_id: str = "") -> LiveHandoff:
        """A handoff that is not begun, by default under a new lease."""
        name = self._request_id, self._request.batch_index
        item = HandoffItem(*name, self._item.encoded, sequence_index)
        handoff = self._table.open(self, item, cause, lease_id)
        self._live.append(handoff)
        return handoff

    def _of(self, run: SequenceRun) -> LiveHandoff | None:
        for handoff in self._live:
            if run in handoff.runs:
                return handoff
        return None

    def _tokens_of(self, run: SequenceRun) -> int:
        """Tokens of a sequence with its prompt."""
        return len(self._item.encoded.token_ids) + len(run.token_ids)
