"""Admission, prefill and decode of a simulated worker, without time: `begin`, wait as long as it says, `finish`.

A sequence is admitted when the batch has a place and the pool has every block that it may come to need, so nothing
is ever preempted. The waiting one with the highest priority goes first, then the one that came first; while it does
not fit, nobody overtakes it.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from itertools import count

from trtmesh.chassis.block_hashes import chain
from trtmesh.chassis.errors import BackendFailed
from trtmesh.engine.backend import (
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    SequenceEnd,
    SequenceStart,
    StepOutput,
)
from trtmesh.engine.backends.simulated.batch import Batch
from trtmesh.engine.backends.simulated.block_pool import BlockPool
from trtmesh.engine.backends.simulated.sequence import Sequence
from trtmesh.engine.backends.simulated.settings import SimulatedSettings
from trtmesh.v1 import generation_pb2 as pb


class Scheduler:
    """Every sequence of a simulated worker: waiting, then in prefill, then in the batch."""

    def __init__(self, settings: SimulatedSettings) -> None:
        self.pool = BlockPool(settings.total_blocks)
        self.batch = Batch()
        self.step_count = 0
        self.waiting_sequences = 0
        self.pending_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.reused_prompt_tokens = 0
        self.generated_tokens = 0
        self._max_batch_size = settings.max_batch_size
        self._prefill_tokens_per_step = settings.prefill_tokens_per_step
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._arrivals = count()
        self._prefilling: deque[Sequence] = deque()
        self._joined: list[Sequence] = []
        self._by_key: dict[int, Sequence] = {}
        self._kv_events: list[KvEvent] = []
        self._starts: list[SequenceStart] = []
        self._ends: list[SequenceEnd] = []

    @property
    def running_sequences(self) -> int:
        return len(self._by_key) - self.waiting_sequences

    @property
    def free_places(self) -> int:
        """Sequences that the batch could take at once."""
        return self._max_batch_size - self.running_sequences

    @property
    def has_work(self) -> bool:
        return bool(self._by_key)

    def add(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue; one that a migration brought complete ends at once."""
        self._by_key[sequence.key] = sequence
        self.waiting_sequences += 1
        self.pending_prompt_tokens += sequence.prefill_left
        if sequence.emitted_tokens >= sequence.rule.max_tokens:
            self._end(sequence, pb.FINISH_REASON_LENGTH)
            return
        heapq.heappush(self._waiting, (-sequence.priority, next(self._arrivals), sequence))

    def stop(self, keys: list[int], reason: int) -> None:
        """Ends sequences between steps; unknown keys are ignored."""
        for key in keys:
            sequence = self._by_key.get(key)
            if sequence:
                self._end(sequence, reason)

    def stop_all(self, reason: int) -> None:
        self.stop(list(self._by_key), reason)

    def begin(self) -> int:
        """Admits and computes prompts; returns how many prompt tokens the step computes."""
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
        """Ends the step that `begin` began and tells what it made known."""
        self.step_count += 1
        self.computed_prompt_tokens += computed_prompt_tokens
        batch = self.batch
        keys, offsets, counts, token_ids = batch.step(self.step_count)
        self.generated_tokens += len(token_ids)
        self._see_first_tokens()
        for sequence in batch.finished(self.step_count):
            if sequence.ending:
                self._end(sequence, sequence.ending.reason, sequence.ending.stop_token_ids)
        return self._output(keys, offsets, counts, token_ids)

    def leftover(self) -> StepOutput | None:
        """Ends and KV events that arose between steps, if any."""
        return self._output([], [], [], []) if self._ends or self._kv_events else None

    def _output(
        self, keys: list[int], offsets: list[int], counts: list[int], token_ids: list[int]
    ) -> StepOutput:
        ends, self._ends = self._ends, []
        starts, self._starts = self._starts, []
        kv_events, self._kv_events = self._kv_events, []
        return StepOutput(
            self.step_count,
            keys,
            offsets,
            counts,
            token_ids,
            starts=starts,
            ends=ends,
            kv_events=kv_events,
        )

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0][2]
            if sequence.ended:
                heapq.heappop(self._waiting)
            elif self.free_places > 0 and self._allocate(sequence):
                heapq.heappop(self._waiting)
                self.waiting_sequences -= 1
                sequence.scheduled_ns = time.time_ns()
                self._prefilling.append(sequence)
            else:
                return

    def _allocate(self, sequence: Sequence) -> bool:
        hashes = sequence.reusable_hashes
        shared = hashes[: self.pool.match(hashes)]
        private = sequence.blocks_at_most - len(shared)
        if not self.pool.can_acquire(shared, private):
            return False
        evicted = self.pool.acquire(shared, private)
        if evicted:
            self._kv_events.append(BlocksRemoved(evicted))
        sequence.shared, sequence.private_blocks = shared, private
        sequence.reused_blocks = len(shared)
        reused = len(shared) * sequence.tokens_per_block
        sequence.prefill_left -= reused
        self.pending_prompt_tokens -= reused
        self.reused_prompt_tokens += reused
        return True

    def _see_first_tokens(self) -> None:
        """Those that joined for this step have their prompt's KV and their first token now."""
        joined, self._joined = self._joined, []
        for sequence in joined:
            if sequence.ended:
                continue
            sequence.first_token_ns = time.time_ns()
            self._share(sequence, sequence.context, sequence.hashes)
            if sequence.fails:
                error = BackendFailed("the item failed because simulated.fail_item says so")
                self._end(sequence, pb.FINISH_REASON_ERROR, error=error)
            elif sequence.wants_metrics:
                self._starts.append(sequence.start())

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
        self._ends.append(sequence.end(reason, generated, stop_token_ids, error))
        self._release(sequence, generated)
        self.pending_prompt_tokens -= sequence.prefill_left
        if not sequence.scheduled_ns:
            self.waiting_sequences -= 1
        sequence.ended = True
        del self._by_key[sequence.key]

    def _release(self, sequence: Sequence, generated: int) -> None:
        if sequence.first_token_ns and sequence.reuse:
            # The KV of the last token was never computed.
            tokens = sequence.all_tokens(generated)[:-1]
            known = len(sequence.hashes) * sequence.tokens_per_block
            parent = sequence.hashes[-1] if sequence.hashes else sequence.root
            hashes = chain(parent, tokens[known:], sequence.tokens_per_block)
            self._share(sequence, tokens, sequence.hashes + hashes)
        self.pool.release(sequence.shared, sequence.private_blocks)

    def _share(self, sequence: Sequence, tokens: list[int], hashes: list[int]) -> None:
        """Makes the sequence's full blocks reusable, as far as they are not yet."""
        done = len(sequence.shared)
        fresh = hashes[done:]
        if not fresh:
            return
        size = sequence.tokens_per_block
        stored: BlocksStored | None = None
        for number, is_new in enumerate(self.pool.share(fresh), done):
            if not is_new:
                stored = None
                continue
            if stored is None:
                stored = BlocksStored(hashes[number - 1] if number else sequence.root, [], [])
                self._kv_events.append(stored)
            stored.block_hashes.append(hashes[number])
            stored.token_ids += tokens[number * size : (number + 1) * size]
        sequence.shared = sequence.shared + fresh
        sequence.private_blocks -= len(fresh)
