"""Who computes what in the next step.

There is no prefill and no decode: a sequence is `tokens` and `num_computed`, and a step hands out tokens until the
two meet. Chunked prefill, reuse of prefixes and going on after preemption are that one rule.

A sequence is admitted when all its present tokens fit the pool and what the rules keep for the running ones to grow
is left: a block for each, or, where nobody may be paused, all that they may come to need. When growing finds no block,
the running sequence of the highest rank loses its blocks and waits again in its old place. The sequence of the lowest
rank is thus never preempted and always goes on; ranks of newcomers rise with the steps, so every sequence becomes the
lowest at last. Nothing overtakes the first that waits, so large sequences do not starve either.
"""

from __future__ import annotations

import time
from bisect import insort

from trtmesh.engine.backends.torch.memory.block_tables import BlockTables
from trtmesh.engine.backends.torch.memory.blocks import NULL_BLOCK, BlockPool, Prefix
from trtmesh.engine.backends.torch.scheduling.forks import Pairs, reassign
from trtmesh.engine.backends.torch.scheduling.prefixes import Prefixes
from trtmesh.engine.backends.torch.scheduling.room import Room
from trtmesh.engine.backends.torch.scheduling.rules import SchedulingRules
from trtmesh.engine.backends.torch.scheduling.sequence import Chunk, Sequence
from trtmesh.engine.backends.torch.scheduling.waiting import WaitingQueue


class Scheduler:
    """The sequences of a backend, waiting and running, and the blocks they hold."""

    def __init__(
        self, pool: BlockPool, tables: BlockTables, rules: SchedulingRules, prefixes: Prefixes
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.running: list[Sequence] = []
        self.waiting_sequences = 0
        self.pending_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.reused_prompt_tokens = 0
        self.new_blocks = self.reused_blocks = 0
        self.paused_sequences = self.preemptions = 0
        self._rules = rules
        self._prefixes = prefixes
        self._room = Room(pool, tables, rules)
        self._by_key: dict[int, Sequence] = {}
        self._waiting = WaitingQueue(self._lives)
        # Counted as waiting, but in no queue.
        self._unready: dict[int, Sequence] = {}
        self._arrivals = 0
        # Under the key of a leader.
        self._followers: dict[int, list[Sequence]] = {}

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._by_key.values())

    @property
    def present_sequences(self) -> int:
        """Waiting and running together."""
        return len(self._by_key)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to compute."""
        return len(self._by_key) > len(self._unready)

    def find(self, key: int) -> Sequence | None:
        return self._by_key.get(key)

    def add(self, sequence: Sequence, step_count: int) -> None:
        """Takes a new sequence in; `step_count` is that of now."""
        self._enter(sequence, step_count - sequence.head_start)
        self._queue(sequence)

    def ready(self, sequence: Sequence) -> None:
        """A sequence of this scheduler that was added before it was ready may start, in the place that it had."""
        del self._unready[sequence.key]
        self._waiting.push(sequence)

    def reassign(self, pairs: Pairs) -> None:
        """Each pair's first sequence goes on from the computed KV of the second, all pairs at once.

        All sequences run, the firsts are distinct, and every second is among them. This needs no block where as many
        tokens are computed of each. The caller gives the firsts their new tokens.
        """
        self.new_blocks += reassign(pairs, self.pool, self.tables, self._rules.tokens_per_block)

    def remove(self, sequence: Sequence, *, content_is_good: bool = True) -> None:
        """Lets go of a sequence and frees what it holds; bad content is not kept for reuse."""
        del self._by_key[sequence.key]
        self._wake_followers(sequence)
        # Else the dead would be kept by a chain of leaders.
        sequence.leader = None
        if sequence.mates:
            sequence.mates.remove(sequence)
        self.pending_prompt_tokens -= sequence.pending_prompt_tokens
        sequence.let_go()
        if sequence.slot < 0:
            self.waiting_sequences -= 1
            self._unready.pop(sequence.key, None)
            self._unpause(sequence)
            self._waiting.forget_removed(self.waiting_sequences)
            return
        if not content_is_good:
            self.pool.retract(sequence.blocks)
        self.running.remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Chunk]:
        """What to compute in the next step, in rank order: of every running sequence that lacks something."""
        self._grow()
        self._admit()
        chunks = self._chunks()
        while not chunks and self.running:
            # All await mates that find no room. The lowest rank fits alone, and is reached at last.
            self._preempt(self.running[-1])
            self._admit()
            chunks = self._chunks()
        return chunks

    def _chunks(self) -> list[Chunk]:
        left = self._rules.max_step_tokens
        chunks: list[Chunk] = []
        for sequence in self.running:
            lacking = len(sequence.tokens) - sequence.num_computed
            # Most lack one, and one is what anybody gets.
            count = lacking if lacking < 2 else self._rules.chunk(lacking, left, first=not chunks)
            if count:
                left -= count
                chunks.append(Chunk(sequence, sequence.num_computed, count))
        return chunks

    def computed(self, chunk: Chunk) -> None:
        """The KV of `chunk` is in its blocks."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.start + chunk.count
        prompt = min(sequence.num_computed, sequence.submitted_tokens) - chunk.start
        if prompt > 0:
            self.pending_prompt_tokens -= prompt
            self.computed_prompt_tokens += prompt
        if sequence.num_computed // self._rules.tokens_per_block > sequence.num_published:
            self._prefixes.publish(sequence)
            self._drop(sequence)
        if sequence.key in self._followers and sequence.num_computed >= sequence.prompt_tokens - 1:
            self._wake_followers(sequence)

    def _lives(self, sequence: Sequence) -> bool:
        return self._by_key.get(sequence.key) is sequence

    def _enter(self, sequence: Sequence, rank: int) -> None:
        self._arrivals += 1
        sequence.rank = (rank, self._arrivals)
        self._by_key[sequence.key] = sequence
        self.pending_prompt_tokens += sequence.pending_prompt_tokens

    def _queue(self, sequence: Sequence) -> None:
        self.waiting_sequences += 1
        if sequence.is_ready:
            self._waiting.push(sequence)
        else:
            self._unready[sequence.key] = sequence

    def _grow(self) -> None:
        """Gives each running sequence the block for its next token, the lowest rank first."""
        size = self._rules.tokens_per_block
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if len(sequence.tokens) <= len(sequence.blocks) * size:
                position += 1
            elif self.pool.can_allocate(1):
                self._append(sequence, self.pool.allocate(1))
            else:
                self._preempt(self.running[-1])
                # The paused may have mates anywhere.
                position = 0

    def _admit(self) -> None:
        closed = self._rules.static_batch and bool(self.running)
        while sequence := self._waiting.first():
            leader = self._awaited(sequence)
            if leader:
                self._waiting.pop()
                self._followers.setdefault(leader.key, []).append(sequence)
                continue
            if closed and not (sequence.leader and sequence.leader.slot >= 0):
                return
            prefix = self._prefixes.find(sequence)
            if prefix.partial and not self._room.suffices(sequence, prefix, self.running):
                # The block to copy from may be the one that is missing.
                prefix = Prefix(prefix.blocks, len(prefix.blocks) * self._rules.tokens_per_block)
            if not self._room.suffices(sequence, prefix, self.running):
                return
            self._waiting.pop()
            self.waiting_sequences -= 1
            self._start(sequence, prefix)

    def _start(self, sequence: Sequence, prefix: Prefix) -> None:
        self._unpause(sequence)
        sequence.slot = self.tables.take()
        sequence.blocks = self.pool.begin(prefix)
        self.tables.put(sequence.slot, 0, sequence.blocks)
        shared = len(prefix.blocks)
        self._count_new(sequence, len(sequence.blocks) - shared)
        missing = self._rules.blocks(len(sequence.tokens)) - len(sequence.blocks)
        self._append(sequence, self.pool.allocate(missing))
        sequence.num_published = shared
        sequence.num_dropped = prefix.blocks.count(NULL_BLOCK)
        self._prefixes.retain(sequence, 0, shared)
        before = sequence.pending_prompt_tokens
        sequence.num_computed = prefix.tokens
        self.pending_prompt_tokens -= before - sequence.pending_prompt_tokens
        reused = shared - sequence.num_dropped
        self.reused_blocks += reused
        sequence.times.reused_blocks += reused
        if not sequence.times.scheduled_ns:
            sequence.times.scheduled_ns = time.time_ns()
            sequence.cached_prompt_tokens = min(sequence.num_computed, sequence.prompt_tokens)
            self.reused_prompt_tokens += sequence.cached_prompt_tokens
        insort(self.running, sequence, key=lambda running: running.rank)

    def _append(self, sequence: Sequence, blocks: list[int]) -> None:
        self.tables.put(sequence.slot, len(sequence.blocks), blocks)
        sequence.blocks += blocks
        self._count_new(sequence, len(blocks))

    def _count_new(self, sequence: Sequence, blocks: int) -> None:
        sequence.times.new_blocks += blocks
        self.new_blocks += blocks

    def _drop(self, sequence: Sequence) -> None:
        """Releases the blocks that a sliding window has left behind, but for what others are to begin with."""
        seen_from = sequence.num_computed
        if sequence.key in self._followers or any(mate.slot < 0 for mate in sequence.mates):
            # They compute the last token of the prompt, if not more.
            seen_from = min(seen_from, sequence.prompt_tokens - 1)
        first, last = sequence.num_dropped, self._rules.unseen_blocks(seen_from)
        if last > first:
            self.pool.release(sequence.blocks[first:last])
            sequence.blocks[first:last] = [NULL_BLOCK] * (last - first)
            self.tables.put(sequence.slot, first, sequence.blocks[first:last])
            sequence.num_dropped = last

    def _preempt(self, sequence: Sequence) -> None:
        """Releases the blocks of a running sequence and its mates; they wait again, in their old places."""
        for each in sequence.mates or [sequence]:
            if each.slot < 0:
                continue
            self.preemptions += 1
            self.paused_sequences += 1
            each.paused = True
            self.running.remove(each)
            self._release(each)
            before = each.pending_prompt_tokens
            each.num_computed = 0
            self.pending_prompt_tokens += each.pending_prompt_tokens - before
            self._queue(each)

    def _unpause(self, sequence: Sequence) -> None:
        self.paused_sequences -= sequence.paused
        sequence.paused = False

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        self.tables.give_back(sequence.slot)
        sequence.blocks = []
        sequence.num_dropped = 0
        sequence.slot = -1

    def _awaited(self, sequence: Sequence) -> Sequence | None:
        """Its leader, if that has yet to compute the prompt of both."""
        leader = sequence.leader
        if leader is None or not self._lives(leader):
            return None
        shared = min(leader.prompt_tokens, sequence.most_reusable)
        return leader if leader.num_computed < shared else None

    def _wake_followers(self, leader: Sequence) -> None:
        """Queues those that need not wait for their leader; where it is gone, the first leads the others."""
        followers = [each for each in self._followers.pop(leader.key, []) if self._lives(each)]
        if not self._lives(leader):
            for each in followers:
                each.leader = followers[0] if each is not followers[0] else None
        for each in followers:
            self._waiting.push(each)
