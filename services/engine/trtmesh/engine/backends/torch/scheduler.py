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
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtmesh.engine.backends.torch.block_tables import BlockTables
from trtmesh.engine.backends.torch.blocks import NULL_BLOCK, BlockPool, Prefix
from trtmesh.engine.backends.torch.sequence import PRIORITY_STEPS, Sequence
from trtmesh.engine.block_hashes import block_hash, root_hash

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + count) of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    count: int
    given_logits: Tensor | None = None
    """Logits [positions, vocabulary] that the sequence's reader wants, once the chunk is computed."""

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
        # Under the key of a leader.
        self._followers: dict[int, list[Sequence]] = {}

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
        self._enter(sequence, step_count - sequence.config.priority * PRIORITY_STEPS)
        self._queue(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Takes in `child`, which goes on from the computed KV of `parent`, a sequence of this scheduler.

        Full blocks are shared, the last one is copied if it is not full. The tokens of the child are those of the
        parent as far as it is to share them. A child that finds no room waits like any other sequence, and may have to
        compute its tokens anew.
        """
        child.leader = parent
        self._enter(child, parent.rank[0])
        self._queue(child)
        prefix = self._led(child)
        if self.tables.free_slots and self._has_room(child, prefix):
            # Its entry in the heap is dropped when it comes up.
            self.waiting_sequences -= 1
            self._start(child, prefix)

    def reassign(self, pairs: SequenceOf[tuple[Sequence, Sequence]]) -> None:
        """Each pair's first sequence goes on from the computed KV of the second, all pairs at once.

        All sequences run, the firsts are distinct, and every second is among them. This needs no block where as many
        tokens are computed of each. The caller gives the firsts their new tokens.
        """
        size = self._tokens_per_block
        state = {
            parent.key: (
                parent.num_computed,
                parent.num_published,
                list(parent.hashes),
                parent.blocks,
            )
            for _, parent in pairs
        }
        heirs = {parent.key: child.key for child, parent in reversed(pairs)}
        heirs |= {child.key: child.key for child, parent in pairs if child is parent}
        for _, parent in pairs:
            self.pool.hold(parent.blocks[: parent.num_computed // size])
        for child, _ in pairs:
            # What is not full goes to the heir as it is.
            own = child.num_computed // size if child.key in heirs else len(child.blocks)
            self.pool.release(child.blocks[:own])
        for child, parent in pairs:
            computed, published, hashes, blocks = state[parent.key]
            full, rest = blocks[: computed // size], blocks[computed // size :]
            if heirs[parent.key] != child.key:
                rest = [self.pool.copy(block) for block in rest]
                child.times.new_blocks += len(rest)
            self.tables.give_back(child.slot)
            child.slot = self.tables.take()
            child.blocks = full + rest
            self.tables.put(child.slot, 0, child.blocks)
            child.num_computed, child.num_published = computed, published
            child.hashes = hashes[:published]

    def remove(self, sequence: Sequence, *, content_is_good: bool = True) -> None:
        """Lets go of a sequence and frees what it holds; bad content is not kept for reuse."""
        del self._by_key[sequence.key]
        self._wake_followers(sequence)
        # Else the dead would be kept by a chain of forks.
        sequence.leader = None
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
        """What to compute in the next step, in rank order: of every running sequence that lacks something."""
        self._grow()
        self._admit()
        left = self._max_step_tokens
        chunks = []
        for sequence in self.running:
            start = sequence.num_computed
            count = min(len(sequence.tokens) - start, max(1, left))
            if count:
                left -= count
                chunks.append(Chunk(sequence, start, count))
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """The KV of `chunk` is in its blocks."""
        sequence = chunk.sequence
        before = sequence.pending_prompt_tokens
        sequence.num_computed = chunk.start + chunk.count
        if before:
            done = before - sequence.pending_prompt_tokens
            self.pending_prompt_tokens -= done
            self.computed_prompt_tokens += done
        if sequence.key in self._followers and sequence.num_computed >= sequence.prompt_tokens - 1:
            self._wake_followers(sequence)
        if sequence.num_computed // self._tokens_per_block > sequence.num_published:
            self._publish(sequence)

    def _enter(self, sequence: Sequence, rank: int) -> None:
        self._arrivals += 1
        sequence.rank = (rank, self._arrivals)
        self._by_key[sequence.key] = sequence
        self.pending_prompt_tokens += sequence.pending_prompt_tokens

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
            if self._by_key.get(sequence.key) is not sequence or sequence.slot >= 0:
                heapq.heappop(self._waiting)
                continue
            leader = self._awaited(sequence)
            if leader:
                heapq.heappop(self._waiting)
                self._followers.setdefault(leader.key, []).append(sequence)
                continue
            prefix = max(self._led(sequence), self._reusable(sequence), key=_tokens)
            if prefix.partial and not self._has_room(sequence, prefix):
                # The block to copy from may be the one that is missing.
                whole = len(prefix.blocks) * self._tokens_per_block
                prefix = Prefix(prefix.blocks, whole)
            if not self._has_room(sequence, prefix):
                return
            heapq.heappop(self._waiting)
            self.waiting_sequences -= 1
            self._start(sequence, prefix)

    def _has_room(self, sequence: Sequence, prefix: Prefix) -> bool:
        needed = -(-len(sequence.tokens) // self._tokens_per_block) - len(prefix.blocks)
        return self.pool.can_allocate(needed + len(self.running), beside=prefix)

    def _start(self, sequence: Sequence, prefix: Prefix) -> None:
        size = self._tokens_per_block
        sequence.slot = self.tables.take()
        sequence.blocks = self.pool.begin(prefix)
        self.tables.put(sequence.slot, 0, sequence.blocks)
        sequence.times.new_blocks += len(sequence.blocks) - len(prefix.blocks)
        self._append(
            sequence, self.pool.allocate(-(-len(sequence.tokens) // size) - len(sequence.blocks))
        )
        sequence.num_published = len(prefix.blocks)
        before = sequence.pending_prompt_tokens
        sequence.num_computed = prefix.tokens
        self.pending_prompt_tokens -= before - sequence.pending_prompt_tokens
        if not sequence.times.scheduled_ns:
            sequence.times.scheduled_ns = time.time_ns()
            sequence.times.reused_blocks = len(prefix.blocks)
            sequence.cached_prompt_tokens = min(sequence.num_computed, sequence.prompt_tokens)
            self.reused_prompt_tokens += sequence.cached_prompt_tokens
        insort(self.running, sequence, key=lambda running: running.rank)

    def _append(self, sequence: Sequence, blocks: list[int]) -> None:
        self.tables.put(sequence.slot, len(sequence.blocks), blocks)
        sequence.blocks += blocks
        sequence.times.new_blocks += len(blocks)

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

    def _reusable(self, sequence: Sequence) -> Prefix:
        """Published blocks of its beginning; what must have logits is always computed."""
        if not self._reuses(sequence):
            return Prefix([], 0)
        full = sequence.most_reusable // self._tokens_per_block
        blocks = self.pool.match(self._hashes(sequence, full)[:full])
        return Prefix(blocks, len(blocks) * self._tokens_per_block)

    def _led(self, sequence: Sequence) -> Prefix:
        """What its leader has computed for it."""
        leader = sequence.leader
        if leader is None or leader.slot < 0:
            return Prefix([], 0)
        most = min(leader.num_computed, sequence.most_reusable)
        rest = range(min(leader.prompt_tokens, most), most)
        tokens = next((at for at in rest if leader.tokens[at] != sequence.tokens[at]), most)
        full = tokens // self._tokens_per_block
        partial = leader.blocks[full] if tokens % self._tokens_per_block else NULL_BLOCK
        return Prefix(leader.blocks[:full], tokens, partial)

    def _awaited(self, sequence: Sequence) -> Sequence | None:
        """Its leader, if that has yet to compute the prompt of both."""
        leader = sequence.leader
        if leader is None or leader.key not in self._by_key:
            return None
        shared = min(leader.prompt_tokens, len(sequence.tokens) - 1)
        return leader if leader.num_computed < shared else None

    def _wake_followers(self, leader: Sequence) -> None:
        """Queues those that need not wait for their leader; where it is gone, the first leads the others."""
        followers = self._followers.pop(leader.key, [])
        followers = [each for each in followers if self._by_key.get(each.key) is each]
        if leader.key not in self._by_key:
            for each in followers:
                each.leader = followers[0] if each is not followers[0] else None
        for each in followers:
            heapq.heappush(self._waiting, (each.rank, each))

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.num_computed // self._tokens_per_block
        first, sequence.num_published = sequence.num_published, full
        if not self._reuses(sequence):
            return
        hashes = self._hashes(sequence, full)
        size = self._tokens_per_block
        for number in range(first, full):
            parent = hashes[number - 1] if number else _root(sequence)
            tokens = sequence.tokens[number * size : (number + 1) * size]
            self.pool.publish(sequence.blocks[number], hashes[number], parent, tokens)

    def _hashes(self, sequence: Sequence, count: int) -> list[int]:
        """Hashes of at least its first `count` blocks, all of them full."""
        hashes = sequence.hashes
        size = self._tokens_per_block
        while len(hashes) < count:
            parent = hashes[-1] if hashes else _root(sequence)
            tokens = sequence.tokens[len(hashes) * size : (len(hashes) + 1) * size]
            hashes.append(block_hash(parent, tokens))
        return hashes


def _root(sequence: Sequence) -> int:
    """Parent of its first block."""
    table = sequence.prompt_table
    digest = table.digest if table else None
    return root_hash(sequence.config.kv_cache.salt, prompt_table_digest=digest)


def _tokens(prefix: Prefix) -> int:
    return prefix.tokens
