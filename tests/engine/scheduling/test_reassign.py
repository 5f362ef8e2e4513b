"""Sequences that continue from another sequence's KV share the blocks and never see later writes."""

from __future__ import annotations

import random

import pytest
from engine.scheduling.paper_engine import BLOCK, PaperEngine, PaperSequence, continued, next_token


def started(engine: PaperEngine, tokens: list[int], new_tokens: int = 20) -> PaperSequence:
    """A running sequence with computed KV and one generated token."""
    sequence = engine.sequence(tokens, new_tokens)
    engine.add(sequence)
    while sequence not in engine.step():
        pass
    sequence.append(next_token(sequence.tokens), 0)
    return sequence


def child_of(
    engine: PaperEngine, parent: PaperSequence, token: int, new_tokens: int = 20
) -> PaperSequence:
    """A sequence with the KV of `parent` and a different last token."""
    child = engine.sequence(parent.tokens[: parent.prompt_tokens], new_tokens)
    child.tokens[:] = [*parent.tokens[:-1], token]
    child.leader = parent
    engine.add(child)
    engine.scheduler._admit()
    return child


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_a_fork_shares_full_blocks_and_copies_the_last(length: int) -> None:
    engine = PaperEngine(blocks=30)
    parent = started(engine, list(range(length)))
    used = engine.pool.used_blocks
    child = child_of(engine, parent, 90)
    full = length // BLOCK
    assert child.blocks[:full] == parent.blocks[:full]
    assert not set(child.blocks[full:]) & set(parent.blocks[full:])
    assert engine.pool.used_blocks == used + 1
    before = engine.scheduler.computed_prompt_tokens
    whole, other = list(parent.tokens), list(child.tokens)
    engine.run()
    assert parent.tokens == continued(whole, 19)
    assert child.tokens == continued(other, len(child.tokens) - len(other))
    assert engine.scheduler.computed_prompt_tokens == before
    assert engine.pool.used_blocks == 0


def test_a_fork_without_room_waits_and_is_computed_anew() -> None:
    engine = PaperEngine(blocks=30, batch=1)
    parent = started(engine, [1, 2, 3, 4, 5])
    child = child_of(engine, parent, 90)
    assert child.slot < 0
    tokens = list(child.tokens)
    engine.run()
    assert child.tokens == continued(tokens, len(child.tokens) - len(tokens))
    assert len(child.tokens) == 25


def test_a_parent_that_ends_before_the_copy_harms_no_fork() -> None:
    engine = PaperEngine(blocks=4)
    parent = started(engine, [1, 2, 3], new_tokens=9)
    child = child_of(engine, parent, 90, new_tokens=9)
    engine.scheduler.remove(parent)
    # Takes the source block of the pending copy.
    engine.add(engine.sequence([7] * 9, 3))
    engine.run()
    assert child.tokens == continued([1, 2, 3, 90], 8)


def test_sequences_are_reassigned_all_at_once() -> None:
    engine = PaperEngine(blocks=9)
    beams = [started(engine, [1, 2, 3, 4, 5])]
    beams += [child_of(engine, beams[0], token) for token in (90, 91)]
    draw = random.Random(3)
    for _ in range(25):
        completing = engine.step()
        assert sorted(each.key for each in completing) == sorted(each.key for each in beams)
        assert engine.scheduler.preemptions == 0
        parents = [draw.choice(beams) for _ in beams]
        tokens = [[*parent.tokens, draw.randrange(97)] for parent in parents]
        engine.scheduler.reassign(list(zip(beams, parents, strict=True)))
        for beam, new in zip(beams, tokens, strict=True):
            beam.tokens[:] = new
        if len(tokens[0]) > 12:
            break
    # The block counts of the item equal the scheduler's.
    assert engine.scheduler.new_blocks == sum(beam.times.new_blocks for beam in beams)
    for beam in beams:
        engine.scheduler.remove(beam)
    assert engine.pool.used_blocks == 0


def test_a_leader_that_ends_leaves_its_work_to_the_next() -> None:
    engine = PaperEngine(blocks=30, step_tokens=4)
    leader, *others = (engine.sequence(range(20), 5) for _ in range(4))
    for other in others:
        other.leader = leader
    engine.add(leader, *others)
    engine.step()
    assert [each.slot >= 0 for each in (leader, *others)] == [True, False, False, False]
    engine.scheduler.remove(leader)
    engine.run()
    assert engine.scheduler.computed_prompt_tokens == 4 + 16 + 2
    assert all(other.tokens == continued(range(20), 5) for other in others)
