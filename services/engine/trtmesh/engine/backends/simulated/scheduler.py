"""Scheduling, prefill and decode of a simulated worker, without time: `begin`, wait for the step time, `finish`.

A sequence starts when the batch has a place and the pool has all blocks of its longest form, so preemption never
happens. The highest priority goes first, then first come, first served; nothing overtakes the first in the queue.
"""

from __future__ import annotations

import heapq
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import count

from trtmesh.chassis.errors import BackendFailed
from trtmesh.engine.adapter_slots import Order
from trtmesh.engine.backend import SequenceEnd, SequenceStart, StepOutput
from trtmesh.engine.backends.simulated.adapters import SimulatedAdapters
from trtmesh.engine.backends.simulated.block_pool import BlockPool
from trtmesh.engine.backends.simulated.sequence import Sequence
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.engine.kv_blocks import KvEventLog, blocks_needed
from trtmesh.engine.ledger import Ledger
from trtmesh.v1 import generation_pb2 as pb


class Scheduler:
    """Every sequence of a simulated worker: waiting, then in prefill, then in the batch."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self.pool = BlockPool(settings.kv_cache.total_blocks)
        self.batch = Batch()
        self.step_count = 0
        self.waiting_sequences = 0
        self.pending_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.reused_prompt_tokens = 0
        self.generated_tokens = 0
        self._max_batch_size = settings.limits.max_batch_size
        self._prefill_tokens_per_step = settings.timing.prefill_tokens_per_step
        self.adapters = SimulatedAdapters(settings.adapters, self._queue)
        self._waiting: list[tuple[Order, Sequence]] = []
        self._arrivals = count()
        self._prefilling: deque[Sequence] = deque()
        self._joined: list[Sequence] = []
        self._ledger = Ledger[Sequence]()
        self._kv_events = KvEventLog()

    @property
    def running_sequences(self) -> int:
        return len(self._ledger.live) - self.waiting_sequences

    @property
    def largest_rank(self) -> int:
        """Rank of the largest adapter in the batch; 0 without adapters."""
        return max((each.adapter.rank for each in self.batch.members if each.adapter), default=0)

    @property
    def present_sequences(self) -> int:
        """Waiting and running together."""
        return len(self._ledger.live)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence; a migrated sequence that is complete ends at once."""
        self._ledger.add(sequence.key, sequence)
        sequence.order = (-sequence.priority, next(self._arrivals))
        self.waiting_sequences += 1
        self.pending_prompt_tokens += sequence.prefill_left
        end = sequence.rule.end_after(sequence.tokens)
        if end:
            self._end(sequence, *end)
        elif sequence.adapter:
            self.adapters.slots.enter(sequence.adapter, sequence.order, sequence)
        else:
            self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def stop(self, keys: list[int], reason: int) -> None:
        """Ends sequences between steps; unknown keys are ignored."""
        for key in keys:
            sequence = self._ledger.live.get(key)
            if sequence:
                self._end(sequence, reason)

    def stop_all(self, reason: int) -> None:
        self.stop(list(self._ledger.live), reason)

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
            if not sequence.prefill_left:
                self._prefilling.popleft()
                self.batch.join(sequence, self.step_count + 1)
                self._joined.append(sequence)
        return self._prefill_tokens_per_step - budget

    def finish(self, computed_prompt_tokens: int) -> StepOutput:
        """Completes the step of `begin` and returns its output."""
        self.step_count += 1
        self.computed_prompt_tokens += computed_prompt_tokens
        output = self._ledger.output
        self.batch.step(self.step_count, output)
        self.generated_tokens += len(output.token_ids)
        self._see_first_tokens()
        for sequence in self.batch.finished(self.step_count):
            if sequence.ending:
                self._end(sequence, *sequence.ending)
        return self._output()

    def leftover(self) -> StepOutput | None:
        """Ends, KV events and states of adapters since the last step, if any."""
        news = self._ledger.output.ends or self._kv_events or self.adapters.store.has_news
        return self._output() if news else None

    def _output(self) -> StepOutput:
        output = self._ledger.take(self.step_count)
        output.kv_events = self._kv_events.take()
        output.adapters = self.adapters.store.take_news()
        return output

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0][1]
            if sequence.ended:
                heapq.heappop(self._waiting)
            elif self.running_sequences < self._max_batch_size and self._allocate(sequence):
                heapq.heappop(self._waiting)
                self.waiting_sequences -= 1
                sequence.times.scheduled_ns = time.time_ns()
                self._prefilling.append(sequence)
            else:
                return

    def _allocate(self, sequence: Sequence) -> bool:
        # The last token is always computed: its logits are needed.
        hashes = sequence.names(sequence.submitted_tokens - 1)
        shared = hashes[: self.pool.match(hashes)]
        most = blocks_needed(sequence.rule.limit, sequence.tokens_per_block)
        private = most - len(shared)
        if not self.pool.can_acquire(shared, private):
            return False
        self._kv_events.removed(self.pool.acquire(shared, private))
        sequence.shared_blocks, sequence.private_blocks = len(shared), private
        sequence.times.reused_blocks, sequence.times.new_blocks = len(shared), private
        reused = len(shared) * sequence.tokens_per_block
        sequence.prefill_left -= reused
        self.pending_prompt_tokens -= reused
        self.reused_prompt_tokens += reused
        return True

    def _see_first_tokens(self) -> None:
        """Publishes the prompt blocks of sequences with their first token in this step."""
        joined, self._joined = self._joined, []
        for sequence in joined:
            if sequence.ended:
                continue
            sequence.times.first_token_ns = time.time_ns()
            self._share(sequence, sequence.submitted_tokens)
            if sequence.fails:
                error = BackendFailed("the item failed because simulated.faults.fail_item says so")
                self._end(sequence, pb.FINISH_REASON_ERROR, error=error)
            elif sequence.wants_metrics:
                start = SequenceStart(sequence.key, sequence.times.metrics_at_start())
                self._ledger.output.starts.append(start)

    def _end(
        self,
        sequence: Sequence,
        reason: int,
        stop_token_ids: tuple[int, ...] = (),
        error: BackendFailed | None = None,
    ) -> None:
        generated = sequence.emitted_tokens
        if sequence.slot >= 0:
            generated = self.step_count - sequence.first_step + 1
            self.batch.leave(sequence)
        if sequence.times.first_token_ns:
            sequence.times.last_token_ns = time.time_ns()
            # The KV of the last token was never computed.
            self._share(sequence, sequence.rule.prompt_tokens + generated - 1)
        self.pool.release(sequence.hashes[: sequence.shared_blocks], sequence.private_blocks)
        self.pending_prompt_tokens -= sequence.prefill_left
        if not sequence.times.scheduled_ns:
            self.waiting_sequences -= 1
        sequence.ended = True
        if sequence.adapter:
            self.adapters.slots.leave(sequence.adapter, sequence.order)
            self.adapters.release(sequence.adapter)
        reused = sequence.times.reused_blocks * sequence.tokens_per_block
        end = SequenceEnd(
            key=sequence.key,
            reason=reason,
            prompt_tokens=sequence.rule.prompt_tokens,
            cached_prompt_tokens=min(reused, sequence.rule.prompt_tokens),
            generated_tokens=generated,
            stop_token_ids=stop_token_ids,
            error=error,
            perf_metrics=sequence.times.perf_metrics() if sequence.wants_metrics else None,
            queue_seconds=sequence.times.queue_seconds,
        )
        self._ledger.end(end)

    def _share(self, sequence: Sequence, tokens: int) -> None:
        """Makes the full blocks of the sequence's first `tokens` tokens reusable."""
        size, shared = sequence.tokens_per_block, sequence.shared_blocks
        fresh = sequence.names(tokens)[shared:]
        parent = sequence.hashes[shared - 1] if shared else sequence.root
        for number, (block, is_new) in enumerate(
            zip(fresh, self.pool.share(fresh), strict=True), shared
        ):
            if is_new:
                content = sequence.tokens[number * size : (number + 1) * size]
                identity = sequence.adapter.identity if sequence.adapter else None
                self._kv_events.stored(parent, block, content, identity)
            parent = block
        sequence.shared_blocks += len(fresh)
        sequence.private_blocks -= len(fresh)


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
