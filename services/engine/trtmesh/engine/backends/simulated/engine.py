"""The steps of a simulated worker, without time: `begin`, wait for the step time, `finish`.

The scheduler is every backend's, with room for the longest form of each started sequence, so no sequence is paused. A
generating sequence is in flight for the scheduler, and in the batch here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Protocol

from trtmesh.chassis.errors import BackendFailed, HandoffFailed, TrtmeshError
from trtmesh.engine.adapter_store import AdapterStore, StoredAdapter
from trtmesh.engine.backend import Content, HandoffState, SequenceStart, StepOutput
from trtmesh.engine.backends.simulated.batch import GeneratingBatch
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence
from trtmesh.engine.backends.simulated.tokens import TokenSource
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.ledger import Ledger
from trtmesh.engine.scheduling.adapter_slots import AdapterDevice
from trtmesh.engine.scheduling.blocks import BlockPool, Move
from trtmesh.engine.scheduling.handoffs import BlockHandoffs, Sending
from trtmesh.engine.scheduling.leases import Outgoing
from trtmesh.engine.scheduling.scheduler import Scheduler
from trtmesh.engine.scheduling.sequence import Chunk, SchedulingRules
from trtmesh.v1 import generation_pb2 as pb


class Places:
    """Implements Tables where nobody reads the blocks."""

    def __init__(self, places: int) -> None:
        self.free_slots = places

    def take(self) -> int:
        self.free_slots -= 1
        return 0

    def put(self, slot: int, first: int, blocks: SequenceOf[int]) -> None: ...

    def replace(self, slot: int, blocks: SequenceOf[int]) -> None: ...

    def give_back(self, slot: int) -> None:
        self.free_slots += 1


def new_scheduler(
    adapters: AdapterDevice[StoredAdapter],
    *,
    total_blocks: int,
    tokens_per_block: int,
    prefill_tokens_per_step: int,
    max_batch_size: int,
    adapter_slots: int,
) -> Scheduler[SimulatedSequence]:
    """The scheduler of a worker without sequences."""
    rules = SchedulingRules(
        tokens_per_block,
        prefill_tokens_per_step,
        chunk_tokens=prefill_tokens_per_step,
        never_pause=True,
        partial_reuse=False,
        max_adapters=adapter_slots,
    )
    return Scheduler(BlockPool(total_blocks), Places(max_batch_size), rules, adapters)


class Adapters(Protocol):
    """The holder of the sequences' adapters."""

    store: AdapterStore[StoredAdapter]

    def release(self, adapter: StoredAdapter) -> None:
        """Takes back the hold of a sequence."""


class SimulatedHandoffs(BlockHandoffs[SimulatedSequence]):
    """The leases of both sides, of blocks without content."""

    def __init__(self, scheduler: Scheduler[SimulatedSequence], *, layers: int = 1) -> None:
        super().__init__(scheduler, layers=layers, layers_per_part=1)

    @property
    def layers(self) -> int:
        """Layers of KV, computed by a step one after another."""
        return self._layers

    def carry_out(self, moves: SequenceOf[Move]) -> None:
        """Moves the content of blocks."""

    def damage(self, _lease_id: str) -> BackendFailed | None:
        """The fault of the KV in the blocks of a receiver's lease."""
        return None

    def state_of(self, _sequence: SimulatedSequence) -> HandoffState | None:
        """The state of a handed over sequence; leases have none."""
        return None


class SimulatedEngine:
    """Every sequence of a simulated worker."""

    def __init__(
        self,
        scheduler: Scheduler[SimulatedSequence],
        adapters: Adapters,
        handoffs: SimulatedHandoffs,
        source: TokenSource,
    ) -> None:
        self.scheduler = scheduler
        self.handoffs = handoffs
        self.batch = GeneratingBatch()
        self.step_count = 0
        self.generated_tokens = 0
        self._adapters = adapters
        self._source = source
        self._ledger = Ledger[SimulatedSequence]()
        self.changed = False
        """Whether the scheduler may have something to start or to compute."""
        self._joined: list[SimulatedSequence] = []
        self._leaving: list[SimulatedSequence] = []
        """Sequences to hand over at the end of this step."""
        self._sending: list[Sending[SimulatedSequence]] = []
        self._layer = 0
        """Next layer of the step."""
        self._pulled: list[SimulatedSequence] = []
        """Sequences with their KV here, but no room for the KV."""

    @property
    def present_sequences(self) -> int:
        """Waiting and running together."""
        return len(self._ledger.live)

    @property
    def waiting_sequences(self) -> int:
        """Without the sequences that await KV."""
        return self.scheduler.waiting_sequences - self.scheduler.unready_sequences

    @property
    def has_work(self) -> bool:
        """Whether a sequence needs steps."""
        return self.scheduler.has_work or bool(self._pulled)

    @property
    def largest_rank(self) -> int:
        """Rank of the largest adapter in the batch; 0 without adapters."""
        return max((each.adapter.rank for each in self.batch.members if each.adapter), default=0)

    @property
    def computes_sent_kv(self) -> bool:
        """Whether this step computes KV announced by layers."""
        return bool(self._sending)

    def add(self, sequences: SequenceOf[SimulatedSequence]) -> None:
        """Takes the sequences of an item; a sequence generated to the end by another worker ends at once."""
        self.changed = True
        for sequence in sequences:
            for key in sequence.keys:
                self._ledger.add(key, sequence)
            if sequence.outgoing:
                self.handoffs.outgoing[sequence.key] = sequence.outgoing
            self.scheduler.add(sequence, self.step_count)
        first = sequences[0]
        if end := first.rule.end_after(first.tokens):
            for sequence in sequences:
                self._end(sequence, *end)
            return
        lease_id = "" if first.is_pulled else first.receiver_lease
        if lease_id and not self.handoffs.expect(lease_id, sequences):
            self._lose_kv(sequences)

    def stop(self, keys: Iterable[int], reason: int) -> None:
        """Ends sequences between steps; unknown keys are ignored."""
        for key in keys:
            sequence = self._ledger.live.get(key)
            if sequence is None:
                continue
            if len(sequence.keys) == 1:
                self._end(sequence, reason)
            else:
                sequence.keys.remove(key)
                self._ledger.end(replace(sequence.end(reason), key=key))
                self._give_back_adapter(sequence)

    def stop_all(self, reason: int) -> None:
        self.stop(list(self._ledger.live), reason)

    def reserve(self, lease_id: str, tokens: int, block_hashes: SequenceOf[int]) -> None:
        """Allocates the blocks of a receiver's lease."""
        self.handoffs.reserve(lease_id, tokens, block_hashes)

    def adopt(self, lease_id: str) -> None:
        """Queues the sequences of a lease's KV; the blocks become the first sequence's."""
        self.changed = True
        if damage := self.handoffs.damage(lease_id):
            for sequence in self.handoffs.drop(lease_id):
                self._end(sequence, pb.FINISH_REASON_ERROR, error=damage)
        else:
            self.handoffs.adopt(lease_id)

    def drop(self, lease_id: str) -> None:
        """Frees the blocks of a lease; waiting sequences fail."""
        self.changed = True
        self._lose_kv(self.handoffs.drop(lease_id))

    def pulled(self, key: int, found: Content | HandoffFailed) -> None:
        """Starts the sequence of pulled KV, or ends a sequence without KV."""
        sequence = self._ledger.live.get(key)
        if sequence is None:
            return
        if found == content_of(sequence.root, sequence.tokens[:-1]):
            self._pulled.append(sequence)
            return
        if not isinstance(found, HandoffFailed):
            found = HandoffFailed("the handoff state names the KV of other tokens")
        self._end(sequence, pb.FINISH_REASON_ERROR, error=found)

    def hand_over(self, key: int, lease_id: str) -> None:
        """Hands a running sequence over after the next token."""
        sequence = self._ledger.live.get(key)
        if sequence is None:
            return
        if not sequence.times.first_token_ns or sequence.outgoing:
            error = HandoffFailed("the sequence has not started, or is handed over already")
            self._end(sequence, pb.FINISH_REASON_ERROR, error=error)
            return
        outgoing = Outgoing(lease_id, len(sequence.tokens), is_pinned=False)
        sequence.outgoing = self.handoffs.outgoing[key] = outgoing
        self._leaving.append(sequence)

    def begin(self) -> int:
        """Starts sequences and computes prompts; returns the number of prompt tokens in the step."""
        if self._pulled:
            self._adopt_pulled()
        if not self.changed:
            self.scheduler.adapters.step()
            return 0
        chunks = self.scheduler.schedule()
        self.handoffs.carry_out(self.scheduler.pool.take_moves())
        self._sending = self.handoffs.sending(chunks)
        tokens, completed = 0, 0
        for chunk in chunks:
            self.scheduler.computed(chunk)
            tokens += chunk.count
            if chunk.completes:
                completed += 1
                self._join(chunk.sequence)
        # Where all generate and none waits, the scheduler has nothing to do before the next change.
        waits = self.scheduler.waiting_sequences > 0
        self.changed = len(chunks) > (0 if waits else completed)
        return tokens

    @property
    def uneventful_steps(self) -> int:
        """Steps from this step on with sequences that only generate: the last of these ends a run."""
        return self.batch.next_end - self.step_count

    def skip(self, steps: int) -> None:
        """Completes some of the uneventful steps, without output; the last step remains to be finished."""
        self.step_count += steps
        self.batch.skip(steps)
        self.generated_tokens += steps * len(self.batch)
        self.scheduler.adapters.step(steps)

    def finish_layer(self) -> int:
        """Announces the KV of the step's next layer; returns the number of layers left."""
        self._layer += 1
        self.handoffs.announce(self._sending, self._layer)
        return self.handoffs.layers - self._layer

    def finish(self) -> StepOutput:
        """Completes the step of `begin`. Returns the output."""
        self.step_count += 1
        output = self._ledger.output
        self.batch.step(self.step_count, output)
        self.generated_tokens += len(output.token_ids)
        if self._sending:
            self.handoffs.announce(self._sending)
            self._sending, self._layer = [], 0
        if self._joined:
            self._see_first_tokens()
        for sequence in self.batch.finished(self.step_count):
            if sequence.ending:
                self._end(sequence, *sequence.ending)
            else:
                self._settle(sequence)
                sequence.make_run(self._source)
                self.batch.follow(sequence, self.step_count + 1)
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if sequence.lives:
                self._end(sequence, pb.FINISH_REASON_HANDOFF)
        return self._output()

    def leftover(self) -> StepOutput | None:
        """Ends, KV events, states of adapters and news of leases since the last step, if any."""
        news = (
            self._ledger.output.ends
            or self.scheduler.pool.published.events
            or self._adapters.store.has_news
            or self.handoffs.news
        )
        return self._output() if news else None

    def _output(self) -> StepOutput:
        output = self._ledger.take(self.step_count)
        output.kv_events = self.scheduler.pool.take_events()
        output.adapters = self._adapters.store.take_news()
        output.handoffs = self.handoffs.take_news()
        return output

    def _adopt_pulled(self) -> None:
        """Gives pulled KV blocks, once there is room."""
        waiting, self._pulled = self._pulled, []
        for sequence in waiting:
            if not sequence.lives:
                continue
            leased = self.scheduler.reserve(len(sequence.tokens) - 1, ())
            if leased is None:
                self._pulled.append(sequence)
                continue
            self.scheduler.adopt(sequence, leased)
            self.changed = True

    def _join(self, sequence: SimulatedSequence) -> None:
        """Lets a sequence generate, or leave with the KV of the prompt."""
        sequence.in_flight = True
        if sequence.outgoing:
            self._leaving.append(sequence)
        if sequence.is_single or not sequence.outgoing:
            sequence.make_run(self._source)
            self.batch.join(sequence, self.step_count + 1)
            self._joined.append(sequence)

    def _see_first_tokens(self) -> None:
        joined, self._joined = self._joined, []
        for sequence in joined:
            if not sequence.lives:
                continue
            sequence.times.first_token_ns = time.time_ns()
            if sequence.fails:
                error = BackendFailed("the item failed because simulated.faults.fail_item says so")
                self._end(sequence, pb.FINISH_REASON_ERROR, error=error)
            elif sequence.config.output.perf_metrics:
                start = SequenceStart(sequence.key, sequence.times.metrics_at_start())
                self._ledger.output.starts.append(start)

    def _settle(self, sequence: SimulatedSequence) -> None:
        """Gives a member of the batch the tokens so far, and counts the KV of all but the last as computed."""
        sequence.take_run(self.step_count - sequence.first_step + 1)
        start, count = sequence.num_computed, len(sequence.tokens) - 1 - sequence.num_computed
        if count > 0:
            self.scheduler.grow(sequence, start + count)
            self.scheduler.computed(Chunk(sequence, start, count))

    def _lose_kv(self, sequences: Iterable[SimulatedSequence]) -> None:
        for sequence in sequences:
            error = HandoffFailed("the KV of the sequence will not come")
            self._end(sequence, pb.FINISH_REASON_ERROR, error=error)

    def _end(
        self,
        sequence: SimulatedSequence,
        reason: int,
        stop_token_ids: tuple[int, ...] = (),
        error: TrtmeshError | None = None,
    ) -> None:
        """Ends a sequence, and frees the blocks or gives the blocks to the lease."""
        self.changed = True
        if sequence.place >= 0:
            self._settle(sequence)
            self.batch.leave(sequence)
        if sequence.times.first_token_ns:
            sequence.times.last_token_ns = time.time_ns()
        end = sequence.end(reason, stop_token_ids, error)
        self.handoffs.leave(sequence, with_kv=reason == pb.FINISH_REASON_HANDOFF)
        end.handoff_state = self.handoffs.state_of(sequence)
        self.scheduler.remove(sequence)
        for key in sequence.keys:
            self._ledger.end(end if key == end.key else replace(end, key=key))
            self._give_back_adapter(sequence)

    def _give_back_adapter(self, sequence: SimulatedSequence) -> None:
        if sequence.adapter:
            self._adapters.release(sequence.adapter)
