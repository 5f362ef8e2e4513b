"""Scheduling, prefill and decode of a simulated worker, without time: `begin`, wait for the step time, `finish`.

A sequence starts when the batch has a place and the pool has all blocks of its longest form, so preemption never
happens. The highest priority goes first, then sequences with KV from a handoff, then first come, first served, or on a
prefill worker as scheduling/prefill_order.py says; nothing overtakes the first in the queue. A sequence with KV holds
its blocks while it waits, and loses them if nothing runs and the first in the queue needs them.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import count

from trtmesh.chassis.errors import BackendFailed, HandoffFailed, TrtmeshError
from trtmesh.engine.backend import SequenceEnd, SequenceStart, StepOutput
from trtmesh.engine.backends.simulated.adapters import SimulatedAdapters
from trtmesh.engine.backends.simulated.block_pool import BlockPool
from trtmesh.engine.backends.simulated.kv_content import KvContent
from trtmesh.engine.backends.simulated.leases import Holding, Leases
from trtmesh.engine.backends.simulated.sequence import Sequence
from trtmesh.engine.backends.simulated.settings import SimulatedHandoffSettings, SimulatedSettings
from trtmesh.engine.backends.simulated.states import StateLeases, UnusableState
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.kv_blocks import KvEventLog, blocks_needed
from trtmesh.engine.kv_memory import Content
from trtmesh.engine.ledger import Ledger
from trtmesh.engine.scheduling.adapter_slots import Order
from trtmesh.engine.scheduling.prefill_order import patience_steps
from trtmesh.v1 import generation_pb2 as pb


class Scheduler:
    """Every sequence of a simulated worker: waiting, then in prefill, then in the batch."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self.content = KvContent(settings.kv_cache)
        self.pool = BlockPool(settings.kv_cache.total_blocks, self.content.freed)
        self.leases = _leases(settings.handoff, self.pool, self.content)
        self.batch = Batch()
        self.step_count = 0
        self.waiting_sequences = 0
        self.awaiting_sequences = 0
        """Sequences that wait for KV, and their followers."""
        self.pending_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.reused_prompt_tokens = 0
        self.generated_tokens = 0
        self._max_batch_size = settings.limits.max_batch_size
        self._prefill_tokens_per_step = settings.timing.prefill_tokens_per_step
        self.adapters = SimulatedAdapters(settings.adapters, self._queue)
        self._waiting: list[tuple[Order, Sequence]] = []
        self._blocked: Sequence | None = None
        """The first in the queue, where free blocks are too few for it."""
        self._arrivals = count()
        self._prefilling: deque[Sequence] = deque()
        self._joined: list[Sequence] = []
        self._leaving: list[Sequence] = []
        """Sequences to hand over at the end of this step."""
        self._adopted: dict[int, Sequence] = {}
        """Waiting sequences with KV, by key."""
        self._ledger = Ledger[Sequence]()
        self._kv_events = KvEventLog()

    @property
    def running_sequences(self) -> int:
        return len(self._ledger.live) - self.waiting_sequences - self.awaiting_sequences

    @property
    def lacks_blocks(self) -> bool:
        """Whether the first in the queue waits for blocks."""
        return self._blocked is not None and not self._blocked.ended

    @property
    def largest_rank(self) -> int:
        """Rank of the largest adapter in the batch; 0 without adapters."""
        return max((each.adapter.rank for each in self.batch.members if each.adapter), default=0)

    @property
    def present_sequences(self) -> int:
        """Waiting and running together."""
        return len(self._ledger.live)

    @property
    def has_work(self) -> bool:
        """Whether a sequence needs steps."""
        return len(self._ledger.live) > self.awaiting_sequences

    def add(self, sequences: list[Sequence]) -> None:
        """Queues the sequences of an item, or lets them wait for KV, or for the first of them; a migrated sequence that
        is complete ends at once."""
        for sequence in sequences:
            self._ledger.add(sequence.key, sequence)
            self.awaiting_sequences += 1
            sequence.waits = True
        if end := sequences[0].rule.end_after(sequences[0].tokens):
            for sequence in sequences:
                self._end(sequence, *end)
            return
        first, *others = sequences
        if first.receiver_lease_id or first.sender_lease_id:
            first.followers = others
            sequences = [first]
        if first.receiver_lease_id or first.is_pulled:
            first.cached_tokens = first.submitted_tokens - 1
            first.prefill_left -= first.cached_tokens
        if first.receiver_lease_id:
            self.leases.wait(first.receiver_lease_id, first)
        elif not first.is_pulled:
            for sequence in sequences:
                self._enter(sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Queues a sequence, once its adapter is there."""
        sequence.waits = False
        self.awaiting_sequences -= 1
        self.waiting_sequences += 1
        self.pending_prompt_tokens += sequence.prefill_left
        rank = self.step_count + self._patience(sequence)
        sequence.order = (
            -sequence.priority,
            not (sequence.adopted or sequence.is_pulled),
            rank,
            next(self._arrivals),
        )
        if sequence.adapter:
            self.adapters.slots.enter(sequence.adapter, sequence.order, sequence)
        else:
            self._queue(sequence)

    def _patience(self, sequence: Sequence) -> int:
        """Steps by which the length of its prompt moves a sequence in the queue."""
        if not sequence.is_prefill:
            return 0
        known = self.pool.match(sequence.names(sequence.submitted_tokens - 1))
        uncomputed = sequence.submitted_tokens - known * sequence.tokens_per_block
        return patience_steps(uncomputed, self._prefill_tokens_per_step)

    def _queue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def stop(self, keys: list[int], reason: int) -> None:
        """Ends sequences between steps; unknown keys are ignored."""
        found = [self._ledger.live[key] for key in keys if key in self._ledger.live]
        # Followers end with this reason rather than with the sequence that leads them.
        for sequence in sorted(found, key=lambda each: bool(each.followers)):
            self._end(sequence, reason)

    def stop_all(self, reason: int) -> None:
        self.stop(list(self._ledger.live), reason)

    def reserve(self, lease_id: str, tokens: int, block_names: SequenceOf[int]) -> None:
        """Allocates the blocks of a receiver's lease."""
        promised = sum(map(self._missing_blocks, self._adopted.values()))
        self._kv_events.removed(self.leases.reserve(lease_id, tokens, block_names, promised))

    def adopt(self, lease_id: str) -> None:
        """Queues the sequence that waits for the KV of a lease; its blocks become the sequence's."""
        found = self.leases.adopt(lease_id)
        if found is None:
            return
        sequence, holding = found
        damage = self.leases.check(lease_id, sequence, holding)
        if damage:
            self.pool.release(holding.shared, holding.private)
            self._end(sequence, pb.FINISH_REASON_ERROR, error=damage)
            return
        self._own(sequence, holding)
        self._enter(sequence)
        for follower in sequence.followers:
            if not follower.ended:
                self._enter(follower)
        sequence.followers = []

    def pulled(self, key: int, found: Content | UnusableState) -> None:
        """Queues the sequence whose KV the library pulled, or ends it without KV."""
        sequence = self._ledger.live.get(key)
        if sequence is None:
            return
        if found == content_of(sequence.root, sequence.tokens[:-1]):
            self._enter(sequence)
            return
        why = found if isinstance(found, UnusableState) else "names the KV of other tokens"
        self._end(sequence, pb.FINISH_REASON_ERROR, error=HandoffFailed(f"the handoff state {why}"))

    def hand_over(self, key: int, lease_id: str) -> None:
        """Hands a running sequence over after its next token."""
        sequence = self._ledger.live.get(key)
        if sequence is None:
            return
        runs = sequence.slot >= 0 and sequence.times.first_token_ns
        if not runs or not sequence.is_single or sequence.sender_lease_id:
            error = HandoffFailed("the sequence has not started, or is one of several of its item")
            self._end(sequence, pb.FINISH_REASON_ERROR, error=error)
            return
        length = sequence.rule.prompt_tokens + self._generated(sequence)
        sequence.sender_lease_id = lease_id
        self.leases.offer(lease_id, sequence, length)
        self.leases.announce(sequence, length - 1)
        self._leaving.append(sequence)

    def begin(self) -> int:
        """Starts sequences and computes prompts; returns the number of prompt tokens in the step."""
        self.adapters.slots.step()
        self._admit()
        budget = self._prefill_tokens_per_step
        while self._prefilling and budget:
            sequence = self._prefilling[0]
            if sequence.ended:
                self._prefilling.popleft()
                continue
            computed = min(budget, sequence.prefill_left)
            sequence.prefill_left -= computed
            budget -= computed
            self.pending_prompt_tokens -= computed
            if sequence.sender_lease_id:
                self._compute_offer(sequence)
            if not sequence.prefill_left:
                self._prefilling.popleft()
                self._join(sequence)
        return self._prefill_tokens_per_step - budget

    def _compute_offer(self, sequence: Sequence) -> None:
        computed = sequence.submitted_tokens - sequence.prefill_left
        self.leases.compute(sequence, computed if sequence.is_single else computed - 1)

    def _join(self, sequence: Sequence) -> None:
        """Lets a sequence generate, or leave with the KV of its prompt."""
        if sequence.sender_lease_id:
            self._leaving.append(sequence)
        if sequence.is_single or not sequence.sender_lease_id:
            self.batch.join(sequence, self.step_count + 1)
            self._joined.append(sequence)

    def finish(self, computed_prompt_tokens: int) -> StepOutput:
        """Completes the step of `begin` and returns its output."""
        self.step_count += 1
        self.computed_prompt_tokens += computed_prompt_tokens
        output = self._ledger.output
        self.batch.step(self.step_count, output)
        self.leases.finish_step()
        self.generated_tokens += len(output.token_ids)
        self._see_first_tokens()
        for sequence in self.batch.finished(self.step_count):
            if sequence.ending:
                self._end(sequence, *sequence.ending)
        self._hand_over_all()
        return self._output()

    def leftover(self) -> StepOutput | None:
        """Ends, KV events, states of adapters and news of leases since the last step, if any."""
        news = (
            self._ledger.output.ends
            or self._kv_events
            or self.adapters.store.has_news
            or self.leases.news
        )
        return self._output() if news else None

    def _output(self) -> StepOutput:
        output = self._ledger.take(self.step_count)
        output.kv_events = self._kv_events.take()
        output.adapters = self.adapters.store.take_news()
        output.handoffs = self.leases.take_news()
        return output

    def _admit(self) -> None:
        self._blocked = None
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.ended:
                heapq.heappop(self._waiting)
            elif self.running_sequences >= self._max_batch_size:
                return
            elif self._allocate(sequence):
                heapq.heappop(self._waiting)
                self.waiting_sequences -= 1
                sequence.times.scheduled_ns = time.time_ns()
                self._start_prefill(sequence)
            else:
                self._blocked = sequence
                return

    def _start_prefill(self, sequence: Sequence) -> None:
        """Lets a prompt follow those that were started before, on a prefill worker those that go first."""
        at = len(self._prefilling)
        while sequence.is_prefill and at and _yields(self._prefilling[at - 1], sequence):
            at -= 1
        self._prefilling.insert(at, sequence)

    def _allocate(self, sequence: Sequence) -> bool:
        """Gives a sequence all blocks of its longest form on this worker, if they are free."""
        if sequence.adopted:
            return self._extend(sequence) or self._reclaim(sequence)
        # The last token is always computed: its logits are needed.
        hashes = sequence.names(sequence.submitted_tokens - 1)
        shared = hashes[: self.pool.match(hashes)]
        private = self._longest_form(sequence) - len(shared)
        if not self.pool.can_acquire(shared, private):
            return self._reclaim(sequence)
        sequence.private, evicted = self.pool.acquire(shared, private)
        self._kv_events.removed(evicted)
        sequence.shared_blocks = len(shared)
        sequence.times.reused_blocks, sequence.times.new_blocks = len(shared), private
        if sequence.is_pulled:
            return True
        reused = sequence.cached_tokens = len(shared) * sequence.tokens_per_block
        self._skip(sequence, reused)
        self.reused_prompt_tokens += reused
        if sequence.sender_lease_id:
            self.leases.offer(sequence.sender_lease_id, sequence, sequence.handoff_tokens)
            self.leases.announce(sequence, reused)
        return True

    def _longest_form(self, sequence: Sequence) -> int:
        """Most blocks that a sequence needs on this worker."""
        tokens = (
            sequence.rule.limit if not sequence.sender_lease_id else sequence.handoff_tokens + 1
        )
        return blocks_needed(tokens, sequence.tokens_per_block)

    def _skip(self, sequence: Sequence, tokens: int) -> None:
        """Leaves out the computation of leading tokens; with a negative number, adds it again."""
        sequence.prefill_left -= tokens
        self.pending_prompt_tokens -= tokens

    def _own(self, sequence: Sequence, holding: Holding) -> None:
        """Gives adopted blocks to a waiting sequence, and publishes them."""
        sequence.adopted = True
        self._adopted[sequence.key] = sequence
        sequence.hashes[:] = holding.shared
        sequence.shared_blocks, sequence.private = len(holding.shared), holding.private
        sequence.times.reused_blocks = len(holding.shared) + len(holding.private)
        self._share(sequence, sequence.cached_tokens)

    def _missing_blocks(self, sequence: Sequence) -> int:
        held = sequence.shared_blocks + len(sequence.private)
        return max(0, self._longest_form(sequence) - held)

    def _extend(self, sequence: Sequence) -> bool:
        """Completes the blocks of a sequence that has KV."""
        missing = self._missing_blocks(sequence)
        if not self.pool.can_acquire((), missing):
            return False
        fresh, evicted = self.pool.acquire((), missing)
        self._kv_events.removed(evicted)
        sequence.private += fresh
        sequence.times.new_blocks = missing
        del self._adopted[sequence.key]
        return True

    def _reclaim(self, sequence: Sequence) -> bool:
        """Takes the KV of the last waiting sequence, so that the first in the queue can start where nothing runs."""
        if self.running_sequences:
            return False
        others = [each for each in self._adopted.values() if each is not sequence]
        if not others:
            return False
        self._give_up(max(others, key=lambda each: each.order))
        return self._allocate(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Returns the blocks of a waiting sequence with KV; it computes what is then not in the pool."""
        del self._adopted[sequence.key]
        self.pool.release(sequence.hashes[: sequence.shared_blocks], sequence.private)
        sequence.shared_blocks, sequence.private, sequence.adopted = 0, [], False
        self._skip(sequence, -sequence.cached_tokens)
        sequence.cached_tokens = 0

    def _see_first_tokens(self) -> None:
        """Publishes the prompt blocks of sequences with their first token in this step."""
        joined, self._joined = self._joined, []
        for sequence in joined:
            if sequence.ended:
                continue
            sequence.times.first_token_ns = time.time_ns()
            if not sequence.sender_lease_id:
                self._share(sequence, sequence.submitted_tokens)
            if sequence.fails:
                error = BackendFailed("the item failed because simulated.faults.fail_item says so")
                self._end(sequence, pb.FINISH_REASON_ERROR, error=error)
            elif sequence.wants_metrics:
                start = SequenceStart(sequence.key, sequence.times.metrics_at_start())
                self._ledger.output.starts.append(start)

    def _hand_over_all(self) -> None:
        """Hands over the sequences whose KV under a sender's lease is complete with this step."""
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            if not sequence.ended:
                self._hand_over(sequence)

    def _hand_over(self, sequence: Sequence) -> None:
        """Ends a sequence, and gives its blocks to its lease."""
        generated = self._generated(sequence)
        tokens = sequence.rule.prompt_tokens + generated - 1
        self.leases.announce(sequence, tokens)
        self.leases.commit(sequence, self._hold(sequence, tokens), generated)
        self._close(sequence, pb.FINISH_REASON_HANDOFF, generated)

    def _hold(self, sequence: Sequence, tokens: int) -> Holding:
        """Takes the blocks of a sequence for its lease, and publishes those of its first `tokens` tokens. A block stays
        where it is, even if the pool has an equal one."""
        shared, size = sequence.shared_blocks, sequence.tokens_per_block
        fresh = sequence.names(tokens)[shared:]
        needed = -(-tokens // size) - shared
        new = self.pool.publish(fresh, sequence.private[: len(fresh)])
        self._report(sequence, fresh, new)
        self.pool.release((), sequence.private[needed:])
        own = [number for number, is_new in zip(sequence.private, new, strict=False) if not is_new]
        own += sequence.private[len(fresh) : needed]
        published = [name for name, is_new in zip(fresh, new, strict=True) if is_new]
        return Holding(sequence.hashes[:shared] + published, own)

    def _generated(self, sequence: Sequence) -> int:
        """Generated tokens, those before its start here included."""
        if sequence.slot < 0:
            return sequence.emitted_tokens
        return self.step_count - sequence.first_step + 1

    def _end(
        self,
        sequence: Sequence,
        reason: int,
        stop_token_ids: tuple[int, ...] = (),
        error: TrtmeshError | None = None,
    ) -> None:
        """Ends a sequence, and frees its blocks."""
        generated = self._generated(sequence)
        if sequence.times.first_token_ns:
            # The KV of the last token was never computed.
            self._share(sequence, sequence.rule.prompt_tokens + generated - 1)
        self.pool.release(sequence.hashes[: sequence.shared_blocks], sequence.private)
        self._close(sequence, reason, generated, stop_token_ids, error)

    def _close(
        self,
        sequence: Sequence,
        reason: int,
        generated: int,
        stop_token_ids: tuple[int, ...] = (),
        error: TrtmeshError | None = None,
    ) -> None:
        """Ends a sequence without blocks, and its followers."""
        sequence.ended = True
        if sequence.times.first_token_ns:
            sequence.times.last_token_ns = time.time_ns()
        self._leave(sequence)
        end = SequenceEnd(
            key=sequence.key,
            reason=reason,
            prompt_tokens=sequence.rule.prompt_tokens,
            cached_prompt_tokens=min(sequence.cached_tokens, sequence.rule.prompt_tokens),
            generated_tokens=generated,
            stop_token_ids=stop_token_ids,
            error=error,
            perf_metrics=sequence.times.perf_metrics() if sequence.wants_metrics else None,
            queue_seconds=sequence.times.queue_seconds,
            handoff_state=self.leases.state_of(sequence),
        )
        self._ledger.end(end)
        for follower in sequence.followers:
            if not follower.ended:
                self._end_follower(follower, reason)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of queue, batch, leases and counts."""
        if sequence.slot >= 0:
            self.batch.leave(sequence)
        if not sequence.waits:
            self.pending_prompt_tokens -= sequence.prefill_left
        if sequence.sender_lease_id or sequence.receiver_lease_id:
            self.leases.forget(sequence)
            self._adopted.pop(sequence.key, None)
        if sequence.waits:
            self.awaiting_sequences -= 1
        elif not sequence.times.scheduled_ns:
            self.waiting_sequences -= 1
        if sequence.adapter:
            if not sequence.waits:
                self.adapters.slots.leave(sequence.adapter, sequence.order)
            self.adapters.release(sequence.adapter)

    def _end_follower(self, sequence: Sequence, reason: int) -> None:
        if reason == pb.FINISH_REASON_HANDOFF:
            self._close(sequence, reason, sequence.emitted_tokens)
        else:
            error = HandoffFailed("the sequence that was to be handed over with this one ended")
            self._end(sequence, pb.FINISH_REASON_ERROR, error=error)

    def _share(self, sequence: Sequence, tokens: int) -> None:
        """Makes the full blocks of the sequence's first `tokens` tokens reusable."""
        fresh = sequence.names(tokens)[sequence.shared_blocks :]
        new = self.pool.share(fresh, sequence.private[: len(fresh)])
        self._report(sequence, fresh, new)
        sequence.shared_blocks += len(fresh)
        del sequence.private[: len(fresh)]

    def _report(self, sequence: Sequence, fresh: list[int], new: list[bool]) -> None:
        """Reports the blocks after the shared ones that are new to the pool."""
        size, shared = sequence.tokens_per_block, sequence.shared_blocks
        parent = sequence.hashes[shared - 1] if shared else sequence.root
        for number, (block, is_new) in enumerate(zip(fresh, new, strict=True), shared):
            if is_new:
                content = sequence.tokens[number * size : (number + 1) * size]
                identity = sequence.adapter.identity if sequence.adapter else None
                self._kv_events.stored(parent, block, content, identity)
            parent = block


def _leases(settings: SimulatedHandoffSettings, pool: BlockPool, content: KvContent) -> Leases:
    if settings.by == "leases":
        return Leases(pool, content)
    return StateLeases(pool, content, kept_seconds=settings.kept_seconds)


def _yields(computing: Sequence, sequence: Sequence) -> bool:
    return computing.is_prefill and computing.order > sequence.order


class Batch:
    """The generating sequences in parallel lists: a step costs a few list operations and no Python loop.

    Every member gets one token per step and is visited only at the end of its run.
    """

    def __init__(self) -> None:
        self.members: list[Sequence] = []
        self._keys: list[int] = []
        self._first_steps: list[int] = []
        self._tokens: list[Iterator[int]] = []
        self._due: defaultdict[int, list[Sequence]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self.members)

    def join(self, sequence: Sequence, step: int) -> None:
        """Adds a sequence that generates from `step` on."""
        sequence.slot = len(self.members)
        # The (virtual) step of token 0.
        sequence.first_step = step - sequence.emitted_tokens
        self.members.append(sequence)
        self._keys.append(sequence.key)
        self._first_steps.append(sequence.first_step)
        run = sequence.next_run()
        self._tokens.append(iter(run))
        self._due[step + len(run) - 1].append(sequence)

    def step(self, step: int, output: StepOutput) -> None:
        """Adds the tokens of one step to `output`."""
        output.keys += self._keys
        output.token_offsets += [step - first for first in self._first_steps]
        output.token_counts += [1] * len(self._keys)
        output.token_ids += map(next, self._tokens)

    def finished(self, step: int) -> list[Sequence]:
        """Returns the members with their last token in `step`; starts the next run of the others that need one."""
        finished = []
        for sequence in self._due.pop(step, ()):
            if sequence.slot < 0:
                continue
            if sequence.ending:
                finished.append(sequence)
            else:
                run = sequence.next_run()
                self._tokens[sequence.slot] = iter(run)
                self._due[step + len(run)].append(sequence)
        return finished

    def leave(self, sequence: Sequence) -> None:
        """Removes a member; the last member takes its place."""
        slot = sequence.slot
        sequence.slot = -1
        last = self.members.pop()
        key, first_step, tokens = self._keys.pop(), self._first_steps.pop(), self._tokens.pop()
        if last is not sequence:
            self.members[slot], self._keys[slot] = last, key
            self._first_steps[slot], self._tokens[slot] = first_step, tokens
            last.slot = slot
