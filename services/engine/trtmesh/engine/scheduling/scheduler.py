"""Decides the tokens of each sequence in the next step.

There are no prefill and decode phases: a sequence is `tokens` and `num_computed`, and steps hand out tokens until the
two meet. This rule covers chunked prefill, prefix reuse and recovery from preemption.

A sequence is admitted when the present tokens fit the pool and enough blocks remain for the running sequences to grow:
a block each, or, where the rules forbid pauses, all blocks ever needed. When a running sequence finds no block to grow
into, the sequence of the highest rank loses all blocks and returns to the old place in the queue. So the lowest rank is
never preempted and always advances. Ranks of newcomers rise with the steps, so every sequence has the lowest rank some
day. Nothing overtakes the head of the queue, so large sequences do not starve either. A sequence without its adapter on
the device waits in adapter_slots.py instead of the queue.

On a prefill worker the shortest prompt goes first: a sequence ranks by the step of arrival plus PATIENCE times the
predicted steps of the prompt. So shorter prompts overtake for a limited time, however many follow.

Leases of handoffs hold blocks too, and are granted only blocks left over by running and queued sequences. A sequence
with the blocks of a lease never waits for the blocks of others: once a place in the batch is free, such a sequence
starts before all queued sequences, or returns the blocks.
"""

from __future__ import annotations

import heapq
import time
from bisect import insort
from collections.abc import Collection, Iterator
from collections.abc import Sequence as SequenceOf
from copy import copy
from typing import Any, Generic

from trtmesh.engine.scheduling.adapter_slots import AdapterDevice, AdapterSlots
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, BlockPool, Prefix, Tables
from trtmesh.engine.scheduling.leases import LeasedBlocks
from trtmesh.engine.scheduling.prefixes import Prefixes
from trtmesh.engine.scheduling.sequence import Chunk, Pairs, Rank, S, SchedulingRules

PATIENCE = 4
"""Shorter prompts may overtake a prompt for so many durations of the prompt's own prefill."""

REMOVED_ENTRIES = 64
"""Entries of removed sequences to keep beyond twice as many as there are waiting sequences."""


class Scheduler(Generic[S]):
    """The waiting and running sequences of a backend, and their blocks."""

    def __init__(
        self,
        pool: BlockPool,
        tables: Tables,
        rules: SchedulingRules,
        device: AdapterDevice[Any],
    ) -> None:
        """`device` takes the adapters."""
        self.pool = pool
        self.tables = tables
        self.running: list[S] = []
        self.waiting_sequences = 0
        self.pending_prompt_tokens = 0
        self.computed_prompt_tokens = 0
        self.reused_prompt_tokens = 0
        self.new_blocks = self.reused_blocks = 0
        self.paused_sequences = self.preemptions = 0
        self.rules = rules
        self._prefixes = Prefixes(pool, rules)
        self._by_key: dict[int, S] = {}
        self._waiting = WaitingQueue[S]()
        # The first in the queue, while free blocks are too few.
        self._blocked: S | None = None
        # With the blocks of leases.
        self._adopted = WaitingQueue[S]()
        # Counted as waiting, but not in the queue.
        self._unready: dict[int, S] = {}
        self._arrivals = 0
        # By the key of their leader.
        self._followers: dict[int, list[S]] = {}
        self.adapters: AdapterSlots[Any, S] = AdapterSlots(rules.max_adapters, device, self._queue)

    @property
    def sequences(self) -> list[S]:
        return list(self._by_key.values())

    @property
    def present_sequences(self) -> int:
        """Waiting and running together."""
        return len(self._by_key)

    @property
    def unready_sequences(self) -> int:
        """Waiting sequences without a complete prompt or KV."""
        return len(self._unready)

    @property
    def lacks_blocks(self) -> bool:
        """Whether the first in the queue waits for blocks."""
        return self._blocked is not None and self._blocked.lives

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to compute."""
        return len(self._by_key) > len(self._unready) + len(self.adapters.parked)

    def add(self, sequence: S, step_count: int) -> None:
        """Takes a new sequence in at step `step_count`."""
        self._enter(sequence, step_count - sequence.head_start + self._patience(sequence))
        self.waiting_sequences += 1
        if sequence.is_ready:
            self._wait(sequence)
        else:
            self._unready[sequence.key] = sequence

    def _patience(self, sequence: S) -> int:
        """The effect of the prompt's length on the rank of a sequence, in steps."""
        if not sequence.is_prefill:
            return 0
        known = self._prefixes.find(sequence).tokens if sequence.is_ready else 0
        return PATIENCE * (len(sequence.tokens) - known) // self.rules.prompt_tokens_per_step

    def ready(self, sequence: S) -> None:
        """Lets a sequence added unready start, in the place of its rank."""
        self._await_no_more(sequence)
        self._wait(sequence)

    def _await_no_more(self, sequence: S) -> None:
        del self._unready[sequence.key]
        if sequence.receiver_lease:
            sequence.receiver_lease = ""
            self.pending_prompt_tokens += sequence.pending_prompt_tokens

    def reserve(self, tokens: int, hashes: SequenceOf[int]) -> LeasedBlocks | None:
        """Blocks for `tokens` tokens, beginning with the blocks published under `hashes`. Returns None where running or
        queued sequences need the room."""
        prefix = self._prefixes.named(hashes, tokens)
        missing = self.rules.blocks(tokens) - len(prefix.blocks)
        if not self.pool.can_allocate(missing + self._promised(), beside=prefix):
            return None
        return LeasedBlocks(self.pool.begin(prefix) + self.pool.allocate(missing), prefix.tokens)

    def _promised(self) -> int:
        """Blocks for running sequences to grow, and for queued sequences to start."""
        promised = sum(map(self.rules.growth, self.running))
        if self.waiting_sequences:
            queued = (each for each in self._by_key.values() if each.slot < 0)
            promised += sum(map(self._needs_to_start, queued))
        return promised

    def _needs_to_start(self, sequence: S) -> int:
        """Blocks for a sequence in the queue, or behind its leader."""
        if sequence.receiver_lease:
            return 0
        shared = len(sequence.blocks)
        if sequence.leader:
            most = min(sequence.prompt_tokens, sequence.most_reusable)
            shared = most // self.rules.tokens_per_block
        return self._needs(sequence, shared)

    def adopt(self, sequence: S, leased: LeasedBlocks) -> None:
        """Gives blocks with the KV of all tokens but the last to a sequence added unready, and lets this start."""
        self._await_no_more(sequence)
        blocks, kept = leased.blocks, self.rules.blocks(len(sequence.tokens))
        first = self.rules.unseen_blocks(self.rules.kept_from(sequence))
        self.pool.release(blocks[:first] + blocks[kept:])
        sequence.blocks = [NULL_BLOCK] * first + blocks[first:kept]
        sequence.num_dropped = sequence.blocks.count(NULL_BLOCK)
        present = leased.present_tokens // self.rules.tokens_per_block
        reused = max(0, present - sequence.num_dropped)
        self._count_reused(sequence, reused)
        self._count_new(sequence, max(0, kept - sequence.num_dropped - reused))
        sequence.cached_prompt_tokens = min(leased.present_tokens, sequence.prompt_tokens)
        self._wait(sequence)
        if sequence.adapter and self.adapters.is_stuck(sequence.adapter, sequence.rank):
            self._return_blocks(sequence)

    def reassign(self, pairs: Pairs[S]) -> None:
        """Makes each pair's first sequence continue from the computed KV of the second, all pairs at once.

        All sequences run, the firsts are distinct, and every second is also a first. Full blocks are shared. A single
        child of each parent, the heir, takes over the partial block; the other children get copies. So no additional
        block is needed where all have equally many computed tokens. The caller gives the firsts their new tokens.
        """
        size = self.rules.tokens_per_block
        heirs = {parent.key: child.key for child, parent in reversed(pairs)}
        heirs |= {child.key: child.key for child, parent in pairs if child is parent}
        parents = {parent.key: copy(parent) for _, parent in pairs}
        for _, parent in pairs:
            self.pool.hold(parent.blocks[: parent.num_computed // size])
        for child, _ in pairs:
            full = child.num_computed // size
            self.pool.release(child.blocks[:full] if child.key in heirs else child.blocks)
        for child, parent in pairs:
            self._continue(child, parents[parent.key], is_heir=heirs[parent.key] == child.key)

    def _continue(self, child: S, parent: S, *, is_heir: bool) -> None:
        """Gives `child` the blocks of `parent`, a copy from before the exchange."""
        full = parent.num_computed // self.rules.tokens_per_block
        rest = parent.blocks[full:]
        if not is_heir:
            rest = [self.pool.copy(block) for block in rest]
            self._count_new(child, len(rest))
        child.blocks = parent.blocks[:full] + rest
        child.num_computed = parent.num_computed
        child.num_dropped = parent.num_dropped
        child.num_published = parent.num_published
        child.hashes = parent.hashes[: parent.num_published]
        self.tables.replace(child.slot, child.blocks)

    def remove(self, sequence: S, *, content_is_good: bool = True) -> None:
        """Removes a sequence and frees the blocks; bad content is not kept for reuse."""
        del self._by_key[sequence.key]
        sequence.lives = False
        self._wake_followers(sequence)
        # A chain of leaders would keep dead sequences in memory.
        sequence.leader = None
        if sequence.mates:
            sequence.mates.remove(sequence)
        self.pending_prompt_tokens -= sequence.pending_prompt_tokens
        if self._unready.pop(sequence.key, None) is None and sequence.adapter:
            self.adapters.leave(sequence.adapter, sequence.rank)
        sequence.let_go()
        if sequence.slot < 0:
            self.pool.release(sequence.blocks)
            self.waiting_sequences -= 1
            self._unpause(sequence)
            self._waiting.tidy(self.waiting_sequences)
            return
        if not content_is_good:
            self.pool.retract(sequence.blocks)
        self.running.remove(sequence)
        self._release(sequence)

    def schedule(self) -> list[Chunk[S]]:
        """The chunks of the next step, in rank order, of every running sequence with uncomputed tokens. None where
        they depend on sequences in flight."""
        if self.adapters.parked:
            self.adapters.step()
        closed = self.rules.static_batch and bool(self.running)
        if not closed:
            self._start_adopted()
        if not self._grow():
            return []
        self._admit(closed=closed)
        chunks = self._chunks()
        while not chunks and self.running and not any(each.in_flight for each in self.running):
            # All wait for mates without room. The lowest rank fits alone and is reached in the end.
            self._preempt(self.running[-1])
            self._admit(closed=closed)
            chunks = self._chunks()
        return chunks

    def next_chunks(self, sequences: SequenceOf[S], again: Collection[S] = ()) -> list[Chunk[S]]:
        """The chunks for the tokens after the last launch, without sequences about to reach their limit, and then for
        the last token of the sequences to compute `again`. Returns no chunks where other sequences could join the step,
        or blocks are lacking."""
        living = [each for each in sequences if each.lives]
        again = [each for each in again if each.lives]
        may_start = self.waiting_sequences and self.tables.free_slots and not self.lacks_blocks
        if len(living) + len(again) < len(self.running) or may_start:
            return []
        going = [each for each in living if len(each.tokens) + 1 < each.rule.limit]
        size = self.rules.tokens_per_block
        growing = [each for each in going if len(each.tokens) + 1 > len(each.blocks) * size]
        if not going or (growing and not self.pool.can_allocate(len(growing))):
            return []
        for each in growing:
            self._append(each, self.pool.allocate(1))
        chunks = [Chunk(each, len(each.tokens), 1) for each in going]
        return chunks + [Chunk(each, len(each.tokens) - 1, 1) for each in again]

    def _chunks(self) -> list[Chunk[S]]:
        left = self.rules.max_step_tokens
        chunks: list[Chunk[S]] = []
        for sequence in self.running:
            lacking = len(sequence.tokens) - sequence.num_computed
            # Most sequences lack a single token, and every sequence gets at least a token.
            count = lacking if lacking < 2 else self.rules.chunk(lacking, left, first=not chunks)
            if count and not sequence.in_flight:
                left -= count
                chunks.append(Chunk(sequence, sequence.num_computed, count))
        return chunks

    def add_drafts(self, chunk: Chunk[S], drafts: SequenceOf[int]) -> None:
        """Adds drafts to a scheduled chunk: as many as there are blocks for, with a block left for every running
        sequence."""
        sequence, size = chunk.sequence, self.rules.tokens_per_block
        missing = self.rules.blocks(chunk.known_end + len(drafts)) - len(sequence.blocks)
        if missing > 0:
            if self.pool.can_allocate(missing + len(self.running)):
                self.tables.put(
                    sequence.slot, len(sequence.blocks), blocks := self.pool.allocate(missing)
                )
                sequence.blocks += blocks
            else:
                drafts = drafts[: len(sequence.blocks) * size - chunk.known_end]
        chunk.drafts = drafts
        chunk.count += len(drafts)

    def verified(self, chunk: Chunk[S]) -> None:
        """Counts the KV of accepted drafts, by now tokens of the sequence, and takes back the blocks of the others."""
        sequence = chunk.sequence
        kept = self.rules.blocks(len(sequence.tokens))
        if surplus := sequence.blocks[kept:]:
            self.pool.release(surplus)
            del sequence.blocks[kept:]
            self.tables.put(sequence.slot, kept, [NULL_BLOCK] * len(surplus))
        self._count_new(sequence, len(sequence.blocks) - self.rules.blocks(chunk.known_end))
        sequence.num_computed = max(sequence.num_computed, len(sequence.tokens) - 1)
        self._publish(sequence)

    def computed(self, chunk: Chunk[S], *, but_last: bool = False) -> None:
        """Counts the KV of `chunk` as present, without drafts and, where another step computes it again, `but_last` the
        last token: later steps run after this step."""
        sequence = chunk.sequence
        sequence.num_computed = chunk.known_end - but_last
        if chunk.start < sequence.submitted_tokens:
            prompt = min(sequence.num_computed, sequence.submitted_tokens) - chunk.start
            self.pending_prompt_tokens -= prompt
            self.computed_prompt_tokens += prompt
        self._publish(sequence)
        if sequence.key in self._followers and sequence.num_computed >= sequence.prompt_tokens - 1:
            self._wake_followers(sequence)

    def _publish(self, sequence: S) -> None:
        if sequence.num_computed // self.rules.tokens_per_block > sequence.num_published:
            self._prefixes.publish(sequence)
            self._drop(sequence)

    def _enter(self, sequence: S, rank: int) -> None:
        self._arrivals += 1
        sequence.rank = (rank, -sequence.config.priority, self._arrivals)
        self._by_key[sequence.key] = sequence
        sequence.lives = True
        self.pending_prompt_tokens += sequence.pending_prompt_tokens

    def _wait(self, sequence: S) -> None:
        """Queues a ready sequence, or parks the sequence until the adapter is on the device."""
        if sequence.adapter:
            self.adapters.enter(sequence.adapter, sequence.rank, sequence)
        else:
            self._queue(sequence)

    def _queue(self, sequence: S) -> None:
        (self._adopted if sequence.blocks else self._waiting).push(sequence)

    def _grow(self) -> bool:
        """Gives each running sequence the block for the next token, the lowest rank first. Returns False rather than
        preempt a sequence in flight."""
        size = self.rules.tokens_per_block
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if len(sequence.tokens) <= len(sequence.blocks) * size:
                position += 1
            elif self.pool.can_allocate(1):
                self._append(sequence, self.pool.allocate(1))
            else:
                # At least the growing sequence is not pinned: a sequence under handoff does not grow.
                last = next(each for each in reversed(self.running) if not each.is_pinned)
                if any(each.in_flight for each in last.mates or [last]):
                    return False
                self._preempt(last)
                # The mates, paused together, may have been anywhere.
                position = 0
        return True

    def _start_adopted(self) -> None:
        """Starts sequences with the blocks of leases; `_grow` gives further blocks, or takes these away."""
        while self.tables.free_slots and (sequence := self._adopted.first()):
            self._adopted.pop()
            computed = min(len(sequence.tokens) - 1, sequence.most_reusable)
            if self._can_continue(sequence, computed):
                self._start_with_kv(sequence, computed)
            else:
                self._return_blocks(sequence)
                self._waiting.push(sequence)

    def _can_continue(self, sequence: S, computed: int) -> bool:
        """Whether a sequence can be computed in its adopted blocks from token `computed` on: without writing to shared
        blocks, seeing all KV in the window, and to the end where the rules forbid pauses."""
        written = sequence.blocks[computed // self.rules.tokens_per_block :]
        if any(map(self.pool.is_shared, written)):
            return False
        if self.rules.window is not None and computed < self.rules.kept_from(sequence):
            return False
        needed = self._needs(sequence, len(sequence.blocks))
        needed += sum(map(self.rules.growth, self.running))
        return not self.rules.never_pause or self.pool.can_allocate(needed)

    def _start_with_kv(self, sequence: S, computed: int) -> None:
        self.waiting_sequences -= 1
        sequence.slot = self.tables.take()
        self.tables.put(sequence.slot, 0, sequence.blocks)
        sequence.num_published = self.rules.first_whole_block(sequence)
        self._set_computed(sequence, computed)
        sequence.times.scheduled_ns = time.time_ns()
        self.reused_prompt_tokens += sequence.cached_prompt_tokens
        insort(self.running, sequence, key=lambda running: running.rank)
        self._prefixes.publish(sequence)

    def _return_blocks(self, sequence: S) -> None:
        """Returns adopted blocks to the pool, where full blocks stay for reuse."""
        sequence.num_published = self.rules.first_whole_block(sequence)
        sequence.num_computed = len(sequence.tokens) - 1
        self._prefixes.publish(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_dropped = sequence.num_computed = 0

    def _admit(self, *, closed: bool = False) -> None:
        self._blocked = None
        if self._waiting.first() is None:
            return
        # Of all running sequences, and of each sequence started below.
        growth = sum(map(self.rules.growth, self.running))
        awaited: dict[int, S] = {}
        for mate in self.running:
            if mate.mates:
                awaited |= {each.key: each for each in _missing(mate)}
        while sequence := self._waiting.first():
            leader = self._awaited(sequence)
            if leader:
                self._waiting.pop()
                self._followers.setdefault(leader.key, []).append(sequence)
                continue
            if closed and not (sequence.leader and sequence.leader.slot >= 0):
                return
            with_it = awaited.copy()
            if sequence.mates:
                with_it |= {each.key: each for each in _missing(sequence)}
            with_it.pop(sequence.key, None)
            prefix = self._prefixes.find(sequence)
            if prefix.partial and not self._has_room(sequence, prefix, growth, with_it.values()):
                # The block to copy from may be the missing block.
                prefix = Prefix(prefix.blocks, len(prefix.blocks) * self.rules.tokens_per_block)
            if not self._has_room(sequence, prefix, growth, with_it.values()):
                return
            self._waiting.pop()
            self.waiting_sequences -= 1
            self._start(sequence, prefix)
            awaited = with_it
            growth += self.rules.growth(sequence)

    def _has_room(self, sequence: S, prefix: Prefix, growth: int, awaited: Collection[S]) -> bool:
        """Whether a waiting sequence can start with `prefix`, together with the `awaited` mates of this sequence and of
        running sequences. All running sequences must still be able to continue: `growth` blocks."""
        if 1 + len(awaited) > self.tables.free_slots:
            return False
        needed = self._needs(sequence, len(prefix.blocks))
        for each in awaited:
            # A mate computes the prompt.
            shared = min(each.prompt_tokens, each.most_reusable)
            needed += self._needs(each, shared // self.rules.tokens_per_block)
        has_blocks = self.pool.can_allocate(needed + growth, beside=prefix)
        self._blocked = None if has_blocks else sequence
        return has_blocks

    def _needs(self, sequence: S, shared: int) -> int:
        """Free blocks for a sequence to start with `shared` blocks."""
        blocks = self.rules.blocks(len(sequence.tokens))
        to_come = self.rules.blocks_to_come(sequence, blocks) if self.rules.never_pause else 0
        return blocks - shared + to_come

    def _start(self, sequence: S, prefix: Prefix) -> None:
        self._unpause(sequence)
        sequence.slot = self.tables.take()
        sequence.blocks = self.pool.begin(prefix)
        self.tables.put(sequence.slot, 0, sequence.blocks)
        shared = len(prefix.blocks)
        self._count_new(sequence, len(sequence.blocks) - shared)
        self.grow(sequence, len(sequence.tokens))
        sequence.num_published = shared
        sequence.num_dropped = prefix.blocks.count(NULL_BLOCK)
        self._prefixes.retain(sequence, 0, shared)
        self._set_computed(sequence, prefix.tokens)
        self._count_reused(sequence, shared - sequence.num_dropped)
        if not sequence.times.scheduled_ns:
            sequence.times.scheduled_ns = time.time_ns()
            sequence.cached_prompt_tokens = min(sequence.num_computed, sequence.prompt_tokens)
            self.reused_prompt_tokens += sequence.cached_prompt_tokens
        insort(self.running, sequence, key=lambda running: running.rank)

    def grow(self, sequence: S, tokens: int) -> None:
        """Gives a running sequence blocks for `tokens` tokens. The rules have promised the room."""
        missing = self.rules.blocks(tokens) - len(sequence.blocks)
        if missing > 0:
            self._append(sequence, self.pool.allocate(missing))

    def _append(self, sequence: S, blocks: list[int]) -> None:
        self.tables.put(sequence.slot, len(sequence.blocks), blocks)
        sequence.blocks += blocks
        self._count_new(sequence, len(blocks))

    def _count_new(self, sequence: S, blocks: int) -> None:
        sequence.times.new_blocks += blocks
        self.new_blocks += blocks

    def _count_reused(self, sequence: S, blocks: int) -> None:
        sequence.times.reused_blocks += blocks
        self.reused_blocks += blocks

    def _set_computed(self, sequence: S, tokens: int) -> None:
        before = sequence.pending_prompt_tokens
        sequence.num_computed = tokens
        self.pending_prompt_tokens -= before - sequence.pending_prompt_tokens

    def _drop(self, sequence: S) -> None:
        """Releases the blocks outside the sliding window, except for the first blocks of mates, of followers and of the
        receiver of a handoff."""
        seen_from = sequence.num_computed
        has_heirs = sequence.outgoing is not None or sequence.key in self._followers
        if has_heirs or any(mate.slot < 0 for mate in sequence.mates):
            # They compute at least the last token of the prompt.
            seen_from = min(seen_from, sequence.prompt_tokens - 1)
        first, last = sequence.num_dropped, self.rules.unseen_blocks(seen_from)
        if last > first:
            self.pool.release(sequence.blocks[first:last])
            sequence.blocks[first:last] = [NULL_BLOCK] * (last - first)
            self.tables.put(sequence.slot, first, sequence.blocks[first:last])
            sequence.num_dropped = last

    def _preempt(self, sequence: S) -> None:
        """Releases the blocks of a running sequence and its mates, and queues all in their old places."""
        for each in sequence.mates or [sequence]:
            if each.slot < 0:
                continue
            self.preemptions += 1
            self.paused_sequences += 1
            each.paused = True
            self.running.remove(each)
            self._release(each)
            self._set_computed(each, 0)
            self.waiting_sequences += 1
            self._waiting.push(each)

    def _unpause(self, sequence: S) -> None:
        self.paused_sequences -= sequence.paused
        sequence.paused = False

    def _release(self, sequence: S) -> None:
        self.pool.release(sequence.blocks)
        self.tables.give_back(sequence.slot)
        sequence.blocks = []
        sequence.num_dropped = 0
        sequence.slot = -1

    def _awaited(self, sequence: S) -> S | None:
        """The leader of a sequence, while the leader has yet to compute the shared prompt."""
        leader = sequence.leader
        if leader is None or not leader.lives:
            return None
        shared = min(leader.prompt_tokens, sequence.most_reusable)
        return leader if leader.num_computed < shared else None

    def _wake_followers(self, leader: S) -> None:
        """Queues the followers of a leader with a computed prompt. After the end of the leader, the first follower
        leads the others."""
        followers = [each for each in self._followers.pop(leader.key, []) if each.lives]
        if not leader.lives:
            for each in followers:
                each.leader = followers[0] if each is not followers[0] else None
        for each in followers:
            self._waiting.push(each)


def _missing(sequence: S) -> Iterator[S]:
    """Waiting mates."""
    return (each for each in sequence.mates if each.slot < 0)


class WaitingQueue(Generic[S]):
    """The lowest rank first. Removed sequences stay until they surface or until `tidy` finds too many."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, S]] = []

    def push(self, sequence: S) -> None:
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def first(self) -> S | None:
        """None where no sequence waits."""
        while self._heap and not self._heap[0][1].lives:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        heapq.heappop(self._heap)

    def tidy(self, waiting: int) -> None:
        """Drops removed sequences where these outnumber the `waiting`: behind a stuck first sequence, none would
        surface."""
        if len(self._heap) > 3 * waiting + REMOVED_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[1].lives]
            heapq.heapify(self._heap)
