"""Who computes what in the next step.

There is no prefill and no decode: a sequence is `tokens` and `num_computed`, and a step hands out tokens until the
two meet. Chunked prefill, reuse of prefixes and going on after preemption are that one rule.

A sequence is admitted when all its present tokens fit the pool and one block is left for each running sequence to
grow. When growing finds no block, the running sequence of the highest rank loses its blocks and waits again in its
old place. The sequence of the lowest rank is thus never preempted and always goes on; ranks of newcomers rise with
the steps, so every sequence becomes the lowest at last.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from dataclasses import dataclass

from trtmesh.engine.backends.torch.block_tables import BlockTables
from trtmesh.engine.backends.torch.blocks import BlockPool
from trtmesh.engine.backends.torch.sequence import PRIORITY_STEPS, Sequence
from trtmesh.engine.block_hashes import block_hash, root_hash


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def completes(self) -> bool:
        """Whether a next token can be chosen after it."""
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """The sequences of a backend, waiting and running, and the blocks they hold."""

    def __init__(
        self,
        pool: BlockPool,
        tables: BlockTables,
        *,
        tokens_per_block: int,
        max_step_tokens: int,
        prefix_reuse: bool,
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.running: list[Sequence] = []
        self.waiting_sequences = 0
        self.pending_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.reused_prompt_tokens = 0
        self.preemptions = 0
        self._tokens_per_block = tokens_per_block
        self._max_step_tokens = max_step_tokens
        self._prefix_reuse = prefix_reuse
        self._by_key: dict[int, Sequence] = {}
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._arrivals = 0
        self._fresh: list[int] = []

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._by_key.values())

    @property
    def has_work(self) -> bool:
        return bool(self._by_key)

    def find(self, key: int) -> Sequence | None:
        return self._by_key.get(key)

    def add(self, sequence: Sequence, step_count: int) -> None:
        """Takes a new sequence in; `step_count` is that of now."""
        self._arrivals += 1
        sequence.rank = (step_count - sequence.config.priority * PRIORITY_STEPS, self._arrivals)
        self._by_key[sequence.key] = sequence
        self.pending_prompt_tokens += sequence.pending_prompt_tokens
        self._queue(sequence)

    def remove(self, sequence: Sequence, *, content_is_good: bool = True) -> None:
        """Lets go of a sequence and frees what it holds; bad content is not kept for reuse."""
        del self._by_key[sequence.key]
        self.pending_prompt_tokens -= sequence.pending_prompt_tokens
        if sequence.slot < 0:
            # Its entry in the heap is dropped when it comes up.
            self.waiting_sequences -= 1
            return
        if not content_is_good:
            self.pool.retract(sequence.blocks)
        self.running.remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Chunk]:
        """What to compute in the next step, in rank order; every running sequence has a part in it."""
        self._grow()
        self._admit()
        left = self._max_step_tokens
        chunks = []
        for sequence in self.running:
            start = sequence.num_computed
            count = min(len(sequence.tokens) - start, max(1, left))
            left -= count
            chunks.append(Chunk(sequence, start, count))
        return chunks

    def take_fresh_blocks(self) -> list[int]:
        """Blocks given out since the last call, whose old content must be wiped before they are read."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def computed(self, chunk: Chunk) -> None:
        """The KV of `chunk` is in its blocks."""
        sequence = chunk.sequence
        before = sequence.pending_prompt_tokens
        sequence.num_computed = chunk.start + chunk.count
        if before:
            done = before - sequence.pending_prompt_tokens
            self.pending_prompt_tokens -= done
            self.computed_prompt_tokens += done
        if sequence.num_computed // self._tokens_per_block > sequence.num_published:
            self._publish(sequence)

    def _queue(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.rank, sequence))
        self.waiting_sequences += 1

    def _grow(self) -> None:
        """Gives each running sequence the block for its next token, the lowest rank first."""
        size = self._tokens_per_block
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            position += 1
            if len(sequence.tokens) <= len(sequence.blocks) * size:
                continue
            while not self.pool.can_allocate(1) and self.running[-1] is not sequence:
                self._preempt(self.running[-1])
            if self.pool.can_allocate(1):
                self._append(sequence, self.pool.allocate(1))
            else:
                self._preempt(sequence)

    def _admit(self) -> None:
        while self._waiting and self.tables.free_slots:
            sequence = self._waiting[0][1]
            if self._by_key.get(sequence.key) is not sequence:
                heapq.heappop(self._waiting)
                continue
            reused = self._reusable(sequence)
            needed = -(-len(sequence.tokens) // self._tokens_per_block) - len(reused)
            if not self.pool.can_allocate(needed + len(self.running), holding=reused):
                return
            heapq.heappop(self._waiting)
            self.waiting_sequences -= 1
            self._start(sequence, reused, needed)

    def _start(self, sequence: Sequence, reused: list[int], needed: int) -> None:
        self.pool.hold(reused)
        sequence.slot = self.tables.take()
        sequence.blocks = list(reused)
        self.tables.put(sequence.slot, 0, reused)
        self._append(sequence, self.pool.allocate(needed))
        sequence.num_published = len(reused)
        before = sequence.pending_prompt_tokens
        sequence.num_computed = len(reused) * self._tokens_per_block
        self.pending_prompt_tokens -= before - sequence.pending_prompt_tokens
        if not sequence.times.scheduled_ns:
            sequence.times.scheduled_ns = time.time_ns()
            sequence.times.reused_blocks = len(reused)
            sequence.cached_prompt_tokens = min(sequence.num_computed, sequence.prompt_tokens)
            self.reused_prompt_tokens += sequence.cached_prompt_tokens
        insort(self.running, sequence, key=lambda running: running.rank)

    def _append(self, sequence: Sequence, blocks: list[int]) -> None:
        self.tables.put(sequence.slot, len(sequence.blocks), blocks)
        sequence.blocks += blocks
        sequence.times.new_blocks += len(blocks)
        self._fresh += blocks

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        before = sequence.pending_prompt_tokens
        sequence.num_computed = 0
        self.pending_prompt_tokens += sequence.pending_prompt_tokens - before
        self._queue(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self.tables.give_back(sequence.slot)
        sequence.blocks = []
        sequence.slot = -1

    def _reuses(self, sequence: Sequence) -> bool:
        return self._prefix_reuse and sequence.config.kv_cache.reuse

    def _reusable(self, sequence: Sequence) -> list[int]:
        """Published blocks of its beginning; the last token is always computed, for its logits."""
        if not self._reuses(sequence):
            return []
        full = (len(sequence.tokens) - 1) // self._tokens_per_block
        return self.pool.match(self._hashes(sequence, full)[:full])

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self._tokens_per_block
        first, sequence.num_published = sequence.num_published, full
        if not self._reuses(sequence):
            return
        hashes = self._hashes(sequence, full)
        size = self._tokens_per_block
        for number in range(first, full):
            parent = hashes[number - 1] if number else root_hash(sequence.config.kv_cache.salt)
            tokens = sequence.tokens[number * size : (number + 1) * size]
            self.pool.publish(sequence.blocks[number], hashes[number], parent, tokens)

    def _hashes(self, sequence: Sequence, count: int) -> list[int]:
        """Hashes of at least its first `count` blocks, all of them full."""
        hashes = sequence.hashes
        size = self._tokens_per_block
        while len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(sequence.config.kv_cache.salt)
            tokens = sequence.tokens[len(hashes) * size : (len(hashes) + 1) * size]
            hashes.append(block_hash(parent, tokens))
        return hashes
