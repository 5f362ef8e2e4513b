"""An engine with a list of tokens as KV cache: compares what attention would read with the expected tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from typing import Any

from engine.torch.harness import configure
from trtmesh.chassis.stopping import EndRule
from trtmesh.chassis.vocabulary import GenerationConfig
from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.engine.backends.torch.memory.kvcache import BlockTables
from trtmesh.engine.scheduling.blocks import NULL_BLOCK, BlockPool
from trtmesh.engine.scheduling.leases import LeasedBlocks
from trtmesh.engine.scheduling.scheduler import Scheduler
from trtmesh.engine.scheduling.sequence import Chunk, ScheduledSequence, SchedulingRules

BLOCK = 4
EMPTY = -1


class Instant:
    """Takes adapters in no time."""

    def bring(self, adapter: StoredAdapter, slot: int) -> bool:
        return True

    def note(self, adapter: StoredAdapter) -> None:
        pass


@dataclass(slots=True, eq=False, kw_only=True)
class PaperSequence(ScheduledSequence):
    """Reads logits of the prompt, where asked to."""

    reads_from: int | None = None
    """First token whose logits are needed."""

    @property
    def most_reusable(self) -> int:
        last = len(self.tokens) - 1
        return last if self.reads_from is None else min(self.reads_from, last)


class PaperEngine:
    """Steps a scheduler and a pool; the next token of a sequence is a function of all earlier tokens."""

    def __init__(
        self,
        *,
        blocks: int,
        batch: int = 8,
        step_tokens: int = 16,
        chunk_tokens: int | None = 16,
        never_pause: bool = False,
        static_batch: bool = False,
        reuse: bool = True,
        partial_reuse: bool = True,
        window: int | None = None,
        **pool: Any,
    ) -> None:
        self.now = 0.0
        self.pool = BlockPool(blocks, clock=lambda: self.now, **pool)
        self.tables = BlockTables(batch, 64)
        rules = SchedulingRules(
            BLOCK,
            step_tokens,
            chunk_tokens=chunk_tokens,
            never_pause=never_pause,
            static_batch=static_batch,
            prefix_reuse=reuse,
            partial_reuse=partial_reuse,
            window=window,
        )
        self._window = window or 10**9
        self.scheduler = Scheduler[PaperSequence](self.pool, self.tables, rules, Instant())
        everything = blocks + 1 + self.pool.host_blocks
        self.content = [[EMPTY] * BLOCK for _ in range(everything)]
        self.steps = 0
        self.leases: list[LeasedBlocks] = []
        self._keys = 0

    def sequence(
        self,
        tokens: SequenceOf[int],
        new_tokens: int,
        config: GenerationConfig | None = None,
        *,
        is_prefill: bool = False,
    ) -> PaperSequence:
        config = config or configure()
        rule = EndRule(config.stopping, (), len(tokens), len(tokens) + new_tokens)
        self._keys += 1
        return PaperSequence(
            key=self._keys,
            tokens=list(tokens),
            rule=rule,
            config=config,
            submitted_tokens=len(tokens),
            is_prefill=is_prefill,
        )

    def reserve(self, tokens: int, hashes: SequenceOf[int] = ()) -> LeasedBlocks | None:
        leased = self.scheduler.reserve(tokens, hashes)
        self._move()
        if leased:
            self.leases.append(leased)
        return leased

    def receiving(
        self,
        tokens: SequenceOf[int],
        new_tokens: int,
        lease: LeasedBlocks,
        reads_from: int | None = None,
    ) -> PaperSequence:
        """A sequence that is given the blocks of a lease."""
        sequence = self.awaiting(tokens, new_tokens, reads_from)
        self.receive(sequence, lease)
        return sequence

    def awaiting(
        self, tokens: SequenceOf[int], new_tokens: int, reads_from: int | None = None
    ) -> PaperSequence:
        """A sequence that waits for the blocks of a lease."""
        sequence = self.sequence(tokens, new_tokens)
        sequence.receiver_lease = "lease"
        sequence.reads_from = reads_from
        self.add(sequence)
        return sequence

    def receive(self, sequence: PaperSequence, lease: LeasedBlocks) -> None:
        """Gives a sequence the blocks of a lease, with the KV of all tokens but the last; in a window model, without
        what a sender need not have."""
        sent_from = self.scheduler.rules.kept_from(sequence) + 1 - self._window
        for place, token in enumerate(sequence.tokens[:-1]):
            block = lease.blocks[place // BLOCK]
            if place < lease.present_tokens:
                assert not block or self.content[block][place % BLOCK] == token
            elif place >= sent_from:
                self.content[block][place % BLOCK] = token
        self.leases.remove(lease)
        self.scheduler.adopt(sequence, lease)

    def drop(self, lease: LeasedBlocks) -> None:
        self.leases.remove(lease)
        self.pool.release(lease.blocks)

    def add(self, *sequences: PaperSequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence, self.steps)

    def step(self) -> list[PaperSequence]:
        """Runs a step; returns the sequences with a known next token, which is not appended yet."""
        chunks = self.scheduler.schedule()
        self._move()
        assert self.content[NULL_BLOCK] == [EMPTY] * BLOCK
        for chunk in chunks:
            self._compute(chunk)
        self.steps += 1
        for chunk in chunks:
            self.scheduler.computed(chunk)
        self.check_integrity()
        return [chunk.sequence for chunk in chunks if chunk.completes]

    def _move(self) -> None:
        for move in self.pool.take_moves():
            self.content[move.target] = list(self.content[move.source])

    def run(self) -> None:
        """Steps until everything has ended."""
        while self.scheduler.has_work:
            before = self.steps
            for sequence in self.step():
                self.advance(sequence)
            assert self.steps > before

    def advance(self, sequence: PaperSequence) -> None:
        """Appends the next token, and ends the sequence after the last."""
        sequence.append(next_token(sequence.tokens), 0)
        if sequence.rule.end_after(sequence.tokens):
            self.scheduler.remove(sequence)

    def check_integrity(self) -> None:
        """References, tables and counters agree with the blocks of the sequences."""
        held: dict[int, int] = {}
        running = self.scheduler.running
        for sequence in running:
            assert sequence.num_computed <= len(sequence.tokens) <= len(sequence.blocks) * BLOCK
            assert (
                sequence.blocks == self.tables.rows[sequence.slot][: len(sequence.blocks)].tolist()
            )
        holders = [each.blocks for each in self.scheduler.sequences]
        holders += [each.blocks for each in self.leases]
        for block in filter(None, chain.from_iterable(holders)):
            held[block] = held.get(block, 0) + 1
        assert len({sequence.slot for sequence in running}) == len(running)
        assert self.pool._references == held
        assert self.pool.used_blocks == len(held)
        waiting = [each for each in self.scheduler.sequences if each.slot < 0]
        assert self.scheduler.waiting_sequences == len(waiting)
        assert self.scheduler.paused_sequences == sum(each.paused for each in waiting)
        pending = sum(each.pending_prompt_tokens for each in self.scheduler.sequences)
        assert self.scheduler.pending_prompt_tokens == pending

    def _compute(self, chunk: Chunk[PaperSequence]) -> None:
        row = self.tables.rows[chunk.sequence.slot]
        tokens = chunk.sequence.tokens
        assert chunk.count > 0
        for position in range(max(0, chunk.start + 1 - self._window), chunk.start + chunk.count):
            block = int(row[position // BLOCK])
            assert block != NULL_BLOCK
            if position < chunk.start:
                assert self.content[block][position % BLOCK] == tokens[position]
            else:
                assert not self.pool.is_shared(block)
                self.content[block][position % BLOCK] = tokens[position]


def next_token(tokens: SequenceOf[int]) -> int:
    return (sum(tokens) * 31 + len(tokens)) % 97


def continued(tokens: SequenceOf[int], count: int) -> list[int]:
    """The expected tokens after `count` more."""
    result = list(tokens)
    for _ in range(count):
        result.append(next_token(result))
    return result


def least_blocks(prompt_tokens: int, new_tokens: int, count: int) -> int:
    """Blocks of a group at the end: the prompt's full blocks once, all others per sequence."""
    shared = (prompt_tokens - 1) // BLOCK
    # The last token's KV is never needed.
    return shared + count * (-(-(prompt_tokens + new_tokens - 1) // BLOCK) - shared)
