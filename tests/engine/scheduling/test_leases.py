"""Blocks of leases beside those of sequences: nothing starves, nothing deadlocks, and every block comes back."""

from __future__ import annotations

import random

import pytest
from engine.scheduling.paper_engine import BLOCK, PaperEngine, PaperSequence, continued
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import examples
from trtmesh.chassis.block_hashes import ROOT_HASH, chain
from trtmesh.engine.scheduling.leases import LeasedBlocks, Outgoing


def test_lease_leaves_running_sequences_room_to_grow() -> None:
    engine = PaperEngine(blocks=8)
    engine.add(engine.sequence(range(8), 20))
    engine.step()
    assert engine.reserve(6 * BLOCK) is None
    assert engine.reserve(5 * BLOCK)
    assert engine.pool.used_blocks == 7


def test_lease_leaves_the_longest_form_where_nothing_is_paused() -> None:
    engine = PaperEngine(blocks=8, never_pause=True)
    engine.add(engine.sequence(range(8), 13))
    engine.step()
    assert engine.reserve(4 * BLOCK) is None
    assert engine.reserve(3 * BLOCK)


def test_lease_does_not_overtake_the_queue() -> None:
    engine = PaperEngine(blocks=8)
    engine.add(engine.sequence(range(16), 3), engine.sequence(range(40, 60), 3))
    engine.step()
    assert engine.scheduler.waiting_sequences == 1
    # There are four free blocks, and the queued sequence waits for five.
    assert engine.reserve(BLOCK) is None
    engine.run()
    assert engine.reserve(BLOCK)


def test_lease_begins_with_published_blocks_and_keeps_them() -> None:
    engine = PaperEngine(blocks=8)
    engine.add(engine.sequence(range(12), 2))
    engine.run()
    lease = engine.reserve(15, chain(ROOT_HASH, list(range(12)), BLOCK))
    assert lease
    assert lease.present_tokens == 12
    engine.add(engine.sequence(range(50, 66), 1))
    engine.run()
    kept = [engine.content[block] for block in lease.blocks[:3]]
    assert kept == [list(range(at, at + 4)) for at in (0, 4, 8)]
    engine.drop(lease)
    assert engine.pool.used_blocks == 0


def test_lease_brings_blocks_back_from_host_memory() -> None:
    engine = PaperEngine(blocks=4, host_blocks=8)
    engine.add(engine.sequence(range(12), 2))
    engine.run()
    engine.add(engine.sequence(range(50, 65), 1))
    engine.run()
    assert engine.pool.used_host_blocks
    lease = engine.reserve(13, chain(ROOT_HASH, list(range(12)), BLOCK))
    assert lease
    assert lease.present_tokens == 12
    assert [engine.content[block] for block in lease.blocks[:3]] == [
        list(range(at, at + 4)) for at in (0, 4, 8)
    ]


def test_the_block_of_the_last_token_is_never_shared() -> None:
    engine = PaperEngine(blocks=8)
    engine.add(engine.sequence(range(12), 2))
    engine.run()
    lease = engine.reserve(12, chain(ROOT_HASH, list(range(12)), BLOCK))
    assert lease
    assert lease.present_tokens == 8


def test_awaited_kv_is_not_pending() -> None:
    engine = PaperEngine(blocks=40)
    lease = engine.reserve(10)
    assert lease
    awaiting = engine.awaiting(range(70, 81), 2)
    engine.add(engine.sequence(range(6), 2))
    assert engine.scheduler.pending_prompt_tokens == 6
    engine.step()
    assert engine.scheduler.pending_prompt_tokens == 0
    engine.receive(awaiting, lease)
    engine.step()
    assert engine.scheduler.pending_prompt_tokens == 0
    assert engine.scheduler.computed_prompt_tokens == 6 + 1


def test_adopted_sequence_starts_before_queued_ones() -> None:
    engine = PaperEngine(blocks=40, batch=1)
    lease = engine.reserve(10)
    assert lease
    first = engine.sequence(range(6), 2)
    queued = engine.sequence(range(20, 29), 2)
    engine.add(first, queued)
    for sequence in engine.step():
        engine.advance(sequence)
    adopted = engine.receiving(range(70, 81), 2, lease)
    for sequence in engine.step():
        engine.advance(sequence)
    assert not first.lives
    assert engine.step() == [adopted]
    assert adopted.num_computed == len(adopted.tokens) == 11
    assert queued.num_computed == 0
    assert engine.scheduler.computed_prompt_tokens == 6 + 1


def test_adopted_sequence_takes_its_next_block_from_the_newest() -> None:
    """A holder that waited for a block of others would wait for ever."""
    engine = PaperEngine(blocks=6)
    leases = [engine.reserve(2 * BLOCK) for _ in range(3)]
    adopted = [
        engine.receiving(range(number, number + 9), 4, lease)
        for number, lease in zip((0, 20, 40), leases, strict=True)
        if lease
    ]
    assert engine.pool.free_blocks == 0
    engine.run()
    assert [each.tokens for each in adopted] == [
        continued(range(number, number + 9), 4) for number in (0, 20, 40)
    ]
    assert engine.scheduler.preemptions
    assert engine.pool.used_blocks == 0


def test_adopted_sequence_that_must_not_be_paused_waits_without_blocks() -> None:
    engine = PaperEngine(blocks=8, never_pause=True)
    leases = [engine.reserve(3 * BLOCK) for _ in range(2)]
    adopted = [
        engine.receiving(range(number, number + 13), 12, lease)
        for number, lease in zip((0, 20), leases, strict=True)
        if lease
    ]
    engine.run()
    assert [each.tokens for each in adopted] == [
        continued(range(number, number + 13), 12) for number in (0, 20)
    ]
    assert engine.scheduler.preemptions == 0
    # The second finds its full blocks again.
    assert engine.scheduler.computed_prompt_tokens <= 1 + 1 + BLOCK


def test_sequence_that_is_handed_over_is_not_preempted() -> None:
    engine = PaperEngine(blocks=9, step_tokens=8, chunk_tokens=8)
    old = engine.sequence(range(8), 20)
    engine.add(old)
    engine.step()
    leaving = engine.sequence(range(40, 64), 9)
    leaving.outgoing = Outgoing("lease", 24)
    engine.add(leaving)
    for _ in range(2):
        for sequence in engine.step():
            engine.advance(sequence)
    old.tokens += continued(old.tokens, 6)[len(old.tokens) :]
    blocks = list(leaving.blocks)
    engine.step()
    assert old.paused
    assert leaving.blocks == blocks
    while leaving.num_computed < 24:
        engine.step()
    engine.scheduler.remove(leaving)
    engine.run()
    assert old.tokens == continued(range(8), 20)


@pytest.mark.parametrize(("window", "first"), [(None, 0), (9, 2)])
def test_sender_keeps_what_the_last_token_of_the_prompt_sees(
    window: int | None, first: int
) -> None:
    engine = PaperEngine(blocks=12, step_tokens=4, chunk_tokens=4, window=window)
    leaving = engine.sequence(range(20), 9)
    leaving.outgoing = Outgoing("lease", 20)
    engine.add(leaving)
    while leaving.num_computed < 20:
        engine.step()
    assert engine.scheduler.rules.sent_from(leaving) == first
    assert all(leaving.blocks[first:])


class Traffic:
    """Sequences, leases and adoptions in any order, until everything has ended."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        window = draw.choice([None, None, 6])
        never_pause = draw.random() < 0.3
        self.engine = PaperEngine(
            blocks=draw.randint(8, 20),
            batch=draw.randint(1, 4),
            step_tokens=draw.randint(3, 16),
            chunk_tokens=draw.randint(2, 16),
            never_pause=never_pause,
            static_batch=never_pause and draw.random() < 0.3,
            host_blocks=draw.choice([0, 6]),
            window=window,
        )
        self.expected: list[tuple[PaperSequence, list[int]]] = []
        self.reserved: list[tuple[LeasedBlocks, list[int], int]] = []
        self.stems = [[draw.randrange(97) for _ in range(9)] for _ in range(3)]
        self.adopted = 0

    def act(self) -> None:
        kind = self.draw.random()
        tokens = self.draw.choice(self.stems) + [
            self.draw.randrange(97) for _ in range(self.draw.randint(1, 7))
        ]
        new = self.draw.randint(1, 8)
        if kind < 0.25:
            sequence = self.engine.sequence(tokens, new)
            if self.draw.random() < 0.3:
                sequence.outgoing = Outgoing("lease", len(tokens))
            self.expect(sequence, tokens, new)
            self.engine.add(sequence)
        elif kind < 0.45:
            slack = self.draw.choice([0, 0, 3])
            hashes = chain(ROOT_HASH, tokens, BLOCK) if self.draw.random() < 0.7 else []
            lease = self.engine.reserve(len(tokens) - 1 + slack, hashes)
            if lease:
                self.reserved.append((lease, tokens, new))
        elif kind < 0.6 and self.reserved:
            self.end_lease()
        elif kind < 0.65 and self.engine.scheduler.sequences:
            self.engine.scheduler.remove(self.draw.choice(self.engine.scheduler.sequences))
        else:
            self.step()

    def end_lease(self) -> None:
        lease, tokens, new = self.reserved.pop(self.draw.randrange(len(self.reserved)))
        if self.draw.random() < 0.3:
            self.engine.drop(lease)
            return
        self.adopted += 1
        reads_from = self.draw.choice([None, None, self.draw.randrange(len(tokens))])
        self.expect(self.engine.receiving(tokens, new, lease, reads_from), tokens, new)

    def expect(self, sequence: PaperSequence, tokens: list[int], new: int) -> None:
        self.expected.append((sequence, continued(tokens, new)))

    def step(self) -> None:
        for sequence in self.engine.step():
            if sequence.outgoing and self.draw.random() < 0.9:
                self.engine.scheduler.remove(sequence)
            else:
                self.engine.advance(sequence)
                # A handoff ends with the first token.
                if sequence.outgoing and sequence.lives:
                    self.engine.scheduler.remove(sequence)

    def finish(self) -> None:
        while self.reserved:
            self.end_lease()
        steps = 0
        while self.engine.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < 500, "nothing advances"
        for sequence, tokens in self.expected:
            assert sequence.tokens == tokens[: len(sequence.tokens)]
        assert self.engine.pool.used_blocks == 0
        assert self.engine.scheduler.pending_prompt_tokens == 0


@settings(max_examples=examples(40, soak=150), deadline=None)
@given(st.randoms(use_true_random=False), st.integers(5, 60))
def test_any_traffic_ends_with_all_blocks_free(draw: random.Random, acts: int) -> None:
    traffic = Traffic(draw)
    for _ in range(acts):
        traffic.act()
    traffic.finish()
