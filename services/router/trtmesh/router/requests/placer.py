"""Finds workers for an item and submits its sequences to them; waits for siblings and workers, and counts attempts."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from trtmesh.chassis.errors import (
    AdapterBroken,
    AdapterNotFound,
    AdaptersFull,
    Draining,
    NotUnderstood,
    NoWorker,
    QueueFull,
    TrtmeshError,
    WorkerLost,
    forget_frames,
)
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.router.fleet.assignments import Held
from trtmesh.router.fleet.plan import Leg, Plan
from trtmesh.router.fleet.worker import Worker
from trtmesh.router.fleet.worker_capabilities import Fingerprints
from trtmesh.router.handoffs.live_handoff import NO_LEASE, Lease
from trtmesh.router.hedging.race import SecondCopy
from trtmesh.router.placement import Phase, PlacementQuery
from trtmesh.router.placement.place import DecisionRecord
from trtmesh.router.recorder import Recorder
from trtmesh.router.requests.context import RequestContext
from trtmesh.router.requests.encoding import EncodedItem
from trtmesh.router.requests.siblings import LEAST_SHARED_BLOCKS, GroupMember
from trtmesh.router.streams.sequence import SequenceRun
from trtmesh.router.tracing import ItemTrace, LegTrace
from trtmesh.router.values.request import ItemRequest, fill_worker_config
from trtmesh.v1 import engine_pb2 as engine_pb
from trtmesh.v1 import generation_pb2 as pb

REPEAT_SECONDS, LONGEST_REPEAT_SECONDS = 0.1, 1.6
"""First pause before another attempt at workers that refused, and the longest; each pause doubles."""

MAX_LOST_WORKERS = 4
"""Workers lost in a row with an item without a new token; then WORKER_LOST."""

Failures: TypeAlias = dict[str, TrtmeshError]
"""Latest error of each worker to leave out, by address."""


@dataclass(slots=True)
class _Wait:
    """From the first refusal, or attempt without a worker, until a new token: no answer of a worker prolongs it."""

    ends_at: float
    tokens: int
    """Tokens of the item at the beginning."""
    pause: float = REPEAT_SECONDS
    """The next pause."""
    tried: set[str] = field(default_factory=set)
    """Addresses of the workers with a recorded decision."""
    refused_by: set[str] = field(default_factory=set)
    """Addresses of the workers that refused the item."""


class Attempts:
    """Attempts of an item.

    A poisonous item could take down every worker in turn, so an item ends after `most` losses in a row without a new
    token. Progress between two losses acquits the item.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens = 0
        self._moves = 0
        self._tokens_at_move = 0
        self.fruitless = 0
        self.loss: TrtmeshError | None = None
        """Latest loss of a worker."""
        self.failures: Failures = {}

    def note(self, address: str, error: TrtmeshError, generated_tokens: int) -> bool:
        """Counts a failed worker, once for all of the item's sequences there; False after the last attempt."""
        known = self.failures.get(address)
        forget_frames(error)
        self.failures[address] = error
        if error.row.back_pressure or (known is not None and not known.row.back_pressure):
            return True
        self.loss = error
        self.fruitless = 1 if generated_tokens > self._tokens else self.fruitless + 1
        self._tokens = generated_tokens
        return self.fruitless < self._most

    def moved_from(self, address: str, error: TrtmeshError, tokens: int) -> Failures:
        """Workers to leave out if an item of `tokens` tokens left the worker at `address`.

        Earlier failures are forgiven, since workers recover, but not after `most` moves without a new token: the item
        itself may stop the workers.
        """
        known = self.failures if self._moves_without_gain(tokens) >= self._most else {}
        return {**known, address: error}

    def move(self, failures: Failures, tokens: int) -> None:
        """Counts a move; `failures` comes from `moved_from`."""
        self._moves = self._moves_without_gain(tokens) + 1
        self._tokens_at_move = tokens
        self.failures = failures

    def _moves_without_gain(self, tokens: int) -> int:
        return 0 if tokens > self._tokens_at_move else self._moves

    def latest(self, *kinds: type[TrtmeshError]) -> TrtmeshError | None:
        """The latest failure of these kinds."""
        found = [error for error in self.failures.values() if isinstance(error, kinds)]
        return found[-1] if found else None

    def forgive(self) -> None:
        """Considers every worker again, after no other took the item."""
        self.failures.clear()


def too_many_losses(losses: int, error: TrtmeshError) -> WorkerLost:
    """The error of an item after the last attempt."""
    return WorkerLost(
        f"{losses} workers in a row were lost with this item, the last one so: {error.message}",
        worker=error.worker,
    )


def unplaceable(loss: TrtmeshError | None, error: TrtmeshError) -> TrtmeshError:
    """The error of an item without a worker, after the `loss` of a former worker if any."""
    if loss is None:
        return error
    if isinstance(loss, AdapterNotFound):
        # Its workers are well, but evicted an adapter that nothing else has.
        return loss
    return WorkerLost(
        f"{loss.message}; and no worker continues the item: {error.message}",
        worker=loss.worker,
        retry_after_ms=error.retry_after_ms,
    )


class Placer:
    """Places an item, and again the sequences left by their workers."""

    def __init__(
        self, context: RequestContext, item: ItemRequest, trace: ItemTrace | None = None
    ) -> None:
        self._context = context
        self._trace = trace
        self._fleet = context.mesh.fleet
        self._item = item
        self._member: GroupMember | None = None
        self._identity: Fingerprints | None = None
        self._wait: _Wait | None = None
        self._promise: Leg | None = None
        """Room on another worker for sequences that just left theirs."""
        self._first: DecisionRecord | None = None
        self.attempts = Attempts(MAX_LOST_WORKERS)
        self.may_hand_over = True
        """Whether handoffs are tried: the first failure is the last."""
        self._refusals: dict[str, str] = {}
        """Workers that refused to reserve for the present handoff, by address."""

    @property
    def began(self) -> bool:
        """Whether any worker took the item."""
        return self._identity is not None

    async def prepare(self, encoded: EncodedItem, received_tokens: int) -> None:
        """Waits for the leading sibling with the same prefix, unless a worker holds the prefix already. Raises
        PromptTooLong, before blocks are hashed."""
        tokens = len(encoded.token_ids) + received_tokens
        self._fleet.check_length(self._context.model, tokens)
        siblings = self._context.siblings
        if siblings is None:
            return
        hashes = self._fleet.block_hashes(self._context.model, encoded.blocks)
        self._member = siblings.find(hashes)
        if self._member is None and not self._fleet.has_blocks(hashes[:LEAST_SHARED_BLOCKS]):
            self._member = siblings.lead(hashes)
        if self._member is not None:
            await self._member.wait()

    def place(self, encoded: EncodedItem, waiting: Sequence[SequenceRun]) -> Plan:
        """Books a plan for the sequences without a worker. Raises as `placement.place`."""
        query = self._query(encoded, waiting, self.attempts.failures)
        if self._promise is not None:
            query = query._replace(prefer=self._promise.worker.address)
            self.drop_promise()
        plan = self._fleet.place(query, encoded.blocks)
        cause = "first"
        if waiting:
            cause = "migration" if query.prompt_tokens > len(encoded.token_ids) else "retry"
        self._record(plan.last, cause)
        return plan

    def place_receiver(
        self,
        encoded: EncodedItem,
        runs: Sequence[SequenceRun],
        sender: Worker,
        *,
        stays: bool,
        receiver: str = "",
    ) -> Leg:
        """Books a leg for the rest of sequences, or of a fresh item, with the KV at `sender`; preferably there, if the
        sequences may stay, or at the `receiver` of a plan. Raises as `placement.place`."""
        assert sender.capabilities.kv
        query = self._query(encoded, runs, self.attempts.failures)
        left = {} if stays else {sender.address: "it hands the sequence over"}
        if receiver:
            left = dict.fromkeys(
                self._fleet.workers.keys() - {receiver}, "the plan moves it elsewhere"
            )
        elif not stays:
            query = query._replace(
                elders=self._fleet.elders(sender.address),
                shorter=self._shorter(encoded, sender.address),
            )
        query = query._replace(
            # The sender works meanwhile, so nothing waits for a delivery.
            adapter=query.adapter and replace(query.adapter, deliverable=False),
            exclude={**query.exclude, **query.refused_by, **left},
            prefer=sender.address if stays else "",
        )
        leg = self._fleet.place_receiver(query, encoded.blocks, sender.capabilities.kv)
        self._record(leg, "rebalance" if receiver else "handoff")
        return leg

    def place_copy(
        self, encoded: EncodedItem, run: SequenceRun, left_out: Mapping[str, str]
    ) -> Leg | None:
        """Books a worker with room for a second copy of a sequence; None without one."""
        query = self._query(encoded, [run], self.attempts.failures)
        query = query._replace(
            # A copy is worth no delivery.
            adapter=query.adapter and replace(query.adapter, deliverable=False),
            exclude={**query.exclude, **left_out},
            sequences=1,
            item_sequences=1,
            may_split=False,
        )
        leg = self._fleet.promise(query, encoded.blocks)
        if leg is not None:
            self._record(leg, "hedge")
        return leg

    def submit_copy(self, leg: Leg, encoded: EncodedItem, copy: SecondCopy) -> None:
        """Submits a second copy of a sequence. Raises TrtmeshError, and releases the leg."""
        traced = None if self._trace is None else self._traced(self._trace, leg, [copy])
        try:
            dispatch(leg, self._context, self._item, encoded, [copy], trace=traced)
        except TrtmeshError:
            leg.booking.release(asyncio.get_running_loop().time())
            raise
        if self._trace is not None and traced is not None:
            self._trace.copied(traced)

    def has_place(
        self, encoded: EncodedItem, runs: Sequence[SequenceRun], address: str, error: TrtmeshError
    ) -> bool:
        """Whether another worker has room for the item now; if so, keeps the room, and excludes the worker at `address`
        because of `error`."""
        tokens = sum(len(run.token_ids) for run in runs)
        failures = self.attempts.moved_from(address, error, tokens)
        waiting = [run for run in runs if run.waits_for_worker]
        query = self._query(encoded, waiting, failures)
        query = query._replace(shorter=self._shorter(encoded, address))
        if isinstance(error, Draining):
            query = query._replace(elders=self._fleet.elders(address))
        promise = self._fleet.promise(query, encoded.blocks)
        if promise is None:
            return False
        self.drop_promise()
        self._promise = promise
        self.attempts.move(failures, tokens)
        return True

    def _shorter(self, encoded: EncodedItem, address: str) -> Collection[str]:
        """The workers that would end the item before the one at an address does."""
        worker, most = self._fleet.workers.get(address), self._item.config.stopping.max_tokens
        tokens = len(encoded.token_ids) + (most or sys.maxsize)
        return self._fleet.shorter_than(worker, tokens) if worker else ()

    def drop_promise(self) -> None:
        """Gives the promised room to others, or to the placement that follows."""
        if self._promise is not None:
            self._promise.booking.release(asyncio.get_running_loop().time())
            self._promise = None

    def lost(self, address: str, error: TrtmeshError, generated_tokens: int) -> bool:
        """Counts a worker that failed or refused the item; False after the last attempt."""
        if error.row.back_pressure:
            self._waiting(generated_tokens)
        else:
            # Losses are counted instead.
            self._wait = None
        return self.attempts.note(address, error, generated_tokens)

    def is_news(self, address: str, error: TrtmeshError) -> bool:
        """Whether a worker's refusal is its first in this wait; another failure is news always."""
        if not error.row.back_pressure or self._wait is None:
            return True
        known = address in self._wait.refused_by
        self._wait.refused_by.add(address)
        return not known

    def _waiting(self, tokens: int) -> _Wait:
        """Returns the present wait of the item, with `tokens` tokens; a new wait after progress."""
        if self._wait is None or tokens > self._wait.tokens:
            now = asyncio.get_running_loop().time()
            seconds = self._context.mesh.retries.worker_wait_seconds
            self._wait = _Wait(now + seconds, tokens)
        return self._wait

    def refused(self, address: str, error: TrtmeshError) -> None:
        """Leaves out the full worker at `address` as a receiver, and as the next worker of sequences that began: a
        migration would wait in the queue."""
        self._refusals[address] = error.message

    def dispatch(
        self, leg: Leg, encoded: EncodedItem, runs: Sequence[SequenceRun], lease: Lease
    ) -> None:
        """Submits sequences to the worker of a leg. Raises TrtmeshError."""
        traced = None if self._trace is None else self._traced(self._trace, leg, runs)
        dispatch(leg, self._context, self._item, encoded, runs, lease, traced)
        if self._trace is not None and traced is not None:
            self._trace.began(traced, by_handoff=bool(lease.receiver or lease.state))
        self.dispatched(leg)

    @staticmethod
    def _traced(trace: ItemTrace, leg: Leg, runs: Sequence[Held]) -> LegTrace:
        tokens = {run.sequence_index: len(run.token_ids) for run in runs}
        return trace.leg(leg.worker.name, tokens)

    def dispatched(self, leg: Leg) -> None:
        """Notes the worker's identity for later placements, and the booking for siblings."""
        self._identity = self._identity or leg.worker.capabilities.identity
        self._refusals.clear()
        if self._member is not None:
            self._member.dispatched(leg.worker.address, leg.booking)

    async def wait(
        self, error: NoWorker | AdapterNotFound, news: asyncio.Future[None], tokens: int
    ) -> TrtmeshError | None:
        """Waits for a reason to try again, or for `news` of the item, which has `tokens` tokens; returns the error once
        the wait is futile."""
        wait = self._waiting(tokens)
        seconds_left = wait.ends_at - asyncio.get_running_loop().time()
        if broken := self.attempts.latest(AdapterBroken, NotUnderstood):
            # The worker will not take the item later either.
            return broken
        if not tokens:
            if full := self.attempts.latest(QueueFull):
                # An immediate refusal lets the client try another mesh. Not of a draining worker, which is replaced.
                return full
            if isinstance(error, AdapterNotFound):
                return error
        if seconds_left <= 0 or not self._fleet.may_recover(self._context.model):
            return self.attempts.latest(AdaptersFull) or unplaceable(self.attempts.loss, error)
        left_out = bool(self.attempts.failures or self._refusals)
        self.attempts.forgive()
        self._refusals.clear()
        pause = seconds_left
        if left_out:
            pause, wait.pause = min(pause, wait.pause), min(2 * wait.pause, LONGEST_REPEAT_SECONDS)
        await until_first_ends(self._fleet.change(pause), news)
        return None

    def close(self) -> None:
        """Releases waiting siblings and promised room."""
        self.drop_promise()
        if self._member is not None:
            self._member.close()

    def whole(self, encoded: EncodedItem) -> engine_pb.SubmitCommand:
        """The item as a worker gets it, from its start."""
        command = command_of(self._context, self._item, encoded)
        command.token_ids.extend(encoded.token_ids)
        return command

    def note_end(
        self, recorder: Recorder, encoded: EncodedItem, new_tokens: int, error: str
    ) -> None:
        """Has the record file tell of the item, with the first placement."""
        first, hashes = self._first, list[int]()
        if first is not None:
            hashes = encoded.blocks.hashes(first.decision.chosen.tokens_per_block)
        recorder.note(
            request_id=self._context.request_id,
            batch_index=self._item.batch_index,
            model=self._context.model,
            arrival_time=self._context.arrival_time,
            error=error,
            prompt_tokens=len(encoded.token_ids) or self._item.told_prompt_tokens,
            new_tokens=None if first is None else new_tokens,
            first=first,
            hashes=hashes,
        )

    def _record(self, leg: Leg, cause: str) -> None:
        if self._trace is not None:
            self._trace.placed(cause, leg.decision)
        item, wait = self._item.batch_index, self._wait
        context, address = self._context, leg.worker.address
        if wait is not None and address in wait.tried:
            # Repeats would push the decisions of others out of the log.
            return
        if wait is not None:
            wait.tried.add(address)
        record = DecisionRecord(context.owner, context.request_id, item, cause, leg.decision)
        self._fleet.decisions.add(record)
        self._first = self._first or record

    def _query(
        self, encoded: EncodedItem, waiting: Sequence[SequenceRun], failures: Failures
    ) -> PlacementQuery:
        config = self._item.config
        generated = max(len(run.token_ids) for run in waiting) if waiting else 0
        beams = config.beam_search.beam_width
        together = not waiting or starts(self._item, waiting)
        return PlacementQuery(
            model=self._context.model,
            fields=self._item.worker_fields,
            phase=Phase.PREFILL if self._item.is_context_only else Phase.WHOLE,
            # Without such a worker another one continues, and rounding may change tokens.
            wants_exact=generated > 0 and beams == 1,
            adapter=encoded.need,
            prompt_tokens=len(encoded.token_ids) + generated,
            sequences=len(waiting) or self._item.sequences,
            item_sequences=self._item.sequences if together else 1,
            beams=beams,
            max_tokens=config.stopping.max_tokens,
            exclude=self._excluded(failures),
            avoid=self._member.avoid if self._member else frozenset(),
            prefer=self._member.prefer if self._member else "",
            refused_by=self._refusals.copy(),
            may_split=self.may_hand_over
            and self._is_divisible(encoded, waiting, together=together),
        )

    def _is_divisible(
        self, encoded: EncodedItem, waiting: Sequence[SequenceRun], *, together: bool
    ) -> bool:
        """Whether a single submit carries the sequences, and their data comes from a single worker.

        Several sequences are handed over before the first token, and the prompt's data comes with it.
        """
        config = self._item.config
        if self._item.is_context_only:
            return False
        if not together:
            return len(waiting) == 1
        with_prompt_data = config.output.prompt_log_probs or config.output.context_logits
        several = self._item.sequences > 1
        shares = self._item.has_kv_to_share(len(encoded.token_ids))
        return shares and not (several and with_prompt_data)

    def _excluded(self, failures: Failures) -> dict[str, str]:
        exclude = {address: error.message for address, error in failures.items()}
        if self._identity is not None:
            exclude |= self._refusals
            for address in self._fleet.others_than(self._identity):
                exclude[address] = "its model or tokenizer is not the one that the item began with"
        return exclude


Submit = tuple[list[Held], engine_pb.SubmitCommand]


def dispatch(
    leg: Leg,
    context: RequestContext,
    item: ItemRequest,
    encoded: EncodedItem,
    waiting: Sequence[Held],
    lease: Lease = NO_LEASE,
    trace: LegTrace | None = None,
) -> None:
    """Submits the sequences without a worker."""
    whole = command_of(context, item, encoded)
    if trace is not None:
        whole.traceparent = trace.traceparent
    if item.is_context_only:
        _end_after_first_token(whole.config, is_handed_over=bool(lease.sender))
    for runs, command in _submits(item, waiting, encoded.token_ids, whole):
        if lease is not NO_LEASE:
            command.sender_lease_id, command.receiver_lease_id = lease.sender, lease.receiver
            command.lease_expires_in_ms = round(lease.seconds * 1000)
        if lease.state is not None:
            command.handoff.CopyFrom(lease.state)
        leg.worker.submit(runs, command, leg.booking)


def _end_after_first_token(config: pb.GenerationConfig, *, is_handed_over: bool) -> None:
    """Ends the item with the handoff, whatever the limit, or after a token if no handoff is possible."""
    if is_handed_over:
        config.handoff.phase = pb.GENERATION_PHASE_CONTEXT_ONLY
        if config.stopping.HasField("max_tokens"):
            config.stopping.max_tokens = max(2, config.stopping.max_tokens)
    else:
        config.stopping.max_tokens = 1


def command_of(
    context: RequestContext, item: ItemRequest, encoded: EncodedItem
) -> engine_pb.SubmitCommand:
    """An item as a worker gets it, but for the prompt."""
    command = engine_pb.SubmitCommand(
        request_id=context.request_id,
        batch_index=item.batch_index,
        timeout_ms=context.remaining_ms(),
        draw_index=item.draw_index,
        stop_vocabulary=encoded.stop_vocabulary,
        end_ids=encoded.end_ids,
    )
    fill_worker_config(
        command.config,
        item,
        len(encoded.token_ids),
        encoded.word_ids,
        encoded.spelled_ids,
        context.drawn_seed,
        encoded.identity,
    )
    return command


def _submits(
    item: ItemRequest,
    runs: Sequence[Held],
    prompt: Sequence[int],
    whole: engine_pb.SubmitCommand,
) -> list[Submit]:
    """A single command for sequences at the start, else a command per sequence with the emitted tokens.

    Beams depend on each other, so they restart together.
    """
    if starts(item, runs):
        whole.token_ids.extend(prompt)
        return [(list(runs), whole)]
    return [([run], _resumed(run, prompt, whole)) for run in runs]


def starts(item: ItemRequest, runs: Sequence[Held]) -> bool:
    """Whether a worker gets all sequences together, from their start."""
    if item.config.beam_search.beam_width > 1:
        return True
    for run in runs:
        if run.token_ids:
            return False
    return len(runs) == item.sequences


def _resumed(
    run: Held, prompt: Sequence[int], whole: engine_pb.SubmitCommand
) -> engine_pb.SubmitCommand:
    command = engine_pb.SubmitCommand()
    command.CopyFrom(whole)
    command.token_ids.extend(prompt)
    command.token_ids.extend(run.token_ids)
    command.emitted_tokens = len(run.token_ids)
    command.sequence_index = run.sequence_index
    command.config.sampling.ClearField("num_return_sequences")
    if run.token_ids:
        # The former worker reported the prompt's data before the first token.
        command.config.output.ClearField("prompt_log_probs")
        command.config.output.ClearField("context_logits")
    return command
