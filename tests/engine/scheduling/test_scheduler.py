"""Order of computation: capacity policies, chunks, batches and ranks, with bounds in steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine.scheduling.paper_engine import BLOCK, PaperEngine, PaperSequence, continued
from engine.torch.harness import configure
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import examples
from trtmesh.engine.scheduling.scheduler import PATIENCE, REMOVED_ENTRIES
from trtmesh.engine.scheduling.sequence import PRIORITY_STEPS, SchedulingRules


def add_random(engine: PaperEngine, draw: random.Random, count: int) -> list[tuple[Any, list[int]]]:
    """Sequences with common beginnings, and their expected tokens."""
    added = []
    for _ in range(count):
        shared = [draw.randrange(3)] * draw.randrange(9)
        tokens = [*shared, *(draw.randrange(97) for _ in range(draw.randint(1, 12)))]
        new_tokens = draw.randint(1, 20)
        sequence = engine.sequence(tokens, new_tokens, configure(priority=draw.randint(-1, 1)))
        engine.add(sequence)
        added.append((sequence, continued(tokens, new_tokens)))
    return added


@given(st.integers(0, 2**32), st.booleans(), st.booleans(), st.integers(0, 12))
@settings(max_examples=examples(40, soak=150), deadline=None)
def test_no_rule_changes_what_a_sequence_reads(
    seed: int, never_pause: bool, chunked: bool, host_blocks: int
) -> None:
    draw = random.Random(seed)
    engine = PaperEngine(
        blocks=draw.randint(11, 16),
        batch=draw.randint(1, 6),
        step_tokens=draw.choice([5, 24]),
        chunk_tokens=draw.choice([1, 3, 24]) if chunked else None,
        never_pause=never_pause,
        static_batch=never_pause and draw.random() < 0.3,
        host_blocks=host_blocks,
        window=draw.choice([None, None, 1, 5, 9]),
    )
    added = []
    for _ in range(4):
        added += add_random(engine, draw, draw.randint(1, 5))
        for _ in range(draw.randint(0, 12)):
            for sequence in engine.step():
                engine.advance(sequence)
        sequence, _ = draw.choice(added)
        if draw.random() < 0.3 and sequence.lives:
            engine.scheduler.remove(sequence)
            added = [pair for pair in added if pair[0] is not sequence]
    engine.run()
    for sequence, expected in added:
        assert sequence.tokens == expected
    assert engine.pool.used_blocks == 0
    if never_pause:
        assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize("never_pause", [False, True])
def test_only_max_utilization_pauses_in_a_tiny_pool(never_pause: bool) -> None:
    engine = PaperEngine(blocks=10, never_pause=never_pause)
    sequences = [engine.sequence([number] * 6, 30) for number in range(8)]
    engine.add(*sequences)
    most = 0
    while engine.scheduler.has_work:
        for sequence in engine.step():
            engine.advance(sequence)
        most = max(most, len(engine.scheduler.running))
    assert all(each.tokens == continued(each.tokens[:6], 30) for each in sequences)
    # 35 tokens have KV: 9 of the 10 blocks, so no two are sure to fit.
    assert (engine.scheduler.preemptions, most) == (0, 1) if never_pause else most > 1
    assert never_pause or engine.scheduler.preemptions > 0


def test_guaranteed_sequences_share_the_pool_as_far_as_their_longest_forms_fit() -> None:
    engine = PaperEngine(blocks=10, never_pause=True)
    engine.add(*(engine.sequence([number] * 4, 9) for number in range(5)))
    engine.step()
    # 12 tokens with KV are 3 blocks each.
    assert len(engine.scheduler.running) == 3


def test_a_static_batch_is_closed_until_all_of_it_has_ended() -> None:
    engine = PaperEngine(blocks=40, batch=3, never_pause=True, static_batch=True)
    engine.add(*(engine.sequence([number], 2 + 4 * number) for number in range(5)))
    seen: list[list[int]] = []
    while engine.scheduler.has_work:
        for sequence in engine.step():
            engine.advance(sequence)
        batch = sorted(sequence.key for sequence in engine.scheduler.running)
        if batch and (not seen or batch != seen[-1]):
            seen.append(batch)
    assert seen == [[1, 2, 3], [2, 3], [3], [4, 5], [5]]


def test_a_static_batch_takes_in_the_further_sequences_of_its_items() -> None:
    engine = PaperEngine(blocks=40, batch=4, never_pause=True, static_batch=True)
    leader, other = engine.sequence(range(6), 5), engine.sequence(range(6), 5)
    other.leader = leader
    stranger = engine.sequence([9], 2)
    engine.add(leader, other)
    engine.step()
    engine.add(stranger)
    engine.advance(leader)
    engine.step()
    assert [each.slot >= 0 for each in (leader, other, stranger)] == [True, True, False]


def test_static_batches_that_pause_are_refused() -> None:
    with pytest.raises(ValueError, match="static batch"):
        SchedulingRules(BLOCK, 8, static_batch=True)


def chunks_of(engine: PaperEngine, sequence: PaperSequence) -> list[int]:
    """Computed tokens of a sequence in each step until the first new token."""
    engine.add(sequence)
    sizes = []
    while True:
        before = sequence.num_computed
        completing = engine.step()
        sizes.append(sequence.num_computed - before)
        if sequence in completing:
            return sizes


def test_a_prompt_is_cut_into_chunks_or_not() -> None:
    prompt = list(range(13))
    cases: list[tuple[dict[str, Any], list[int]]] = [
        ({"step_tokens": 16, "chunk_tokens": 16}, [13]),
        ({"step_tokens": 5, "chunk_tokens": 5}, [5, 5, 3]),
        ({"step_tokens": 16, "chunk_tokens": 4}, [4, 4, 4, 1]),
        ({"step_tokens": 16, "chunk_tokens": None}, [13]),
    ]
    for options, expected in cases:
        engine = PaperEngine(blocks=20, **options)
        assert chunks_of(engine, engine.sequence(prompt, 1)) == expected


def test_a_whole_prompt_waits_for_a_step_with_room_and_holds_nobody_up() -> None:
    engine = PaperEngine(blocks=40, step_tokens=12, chunk_tokens=None)
    older = [engine.sequence([number], 6) for number in range(4)]
    engine.add(*older)
    engine.step()
    long, newer = engine.sequence(range(10), 2), engine.sequence([9], 2)
    engine.add(long, newer)
    for sequence in older:
        sequence.append(5, 0)
    completing = engine.step()
    # 4 older tokens and 10 of the long prompt are more than 12.
    assert {*older, newer} == set(completing)
    for sequence in older:
        engine.scheduler.remove(sequence)
    assert long in engine.step()


def test_at_most_a_step_of_tokens_is_computed_besides_one_for_each() -> None:
    engine = PaperEngine(blocks=200, batch=6, step_tokens=8)
    engine.add(*(engine.sequence(range(number, number + 20), 3) for number in range(6)))
    while engine.scheduler.has_work:
        before = engine.scheduler.computed_prompt_tokens
        completing = engine.step()
        assert engine.scheduler.computed_prompt_tokens - before <= 8 + 6
        for sequence in completing:
            engine.advance(sequence)


def test_a_long_prompt_starts_at_once_under_a_stream_of_short_requests() -> None:
    """Later sequences do not overtake: a sequence waits only for earlier sequences."""
    cases: list[dict[str, Any]] = [
        {},
        {"never_pause": True},
        {"chunk_tokens": None, "step_tokens": 64},
    ]
    for options in cases:
        engine = PaperEngine(blocks=16, batch=4, **{"step_tokens": 8, "chunk_tokens": 8, **options})
        for _ in range(6):
            engine.add(engine.sequence([1], 3))
        long = engine.sequence(range(50), 4)
        engine.add(long)
        waited = 0
        while long.lives:
            engine.add(engine.sequence([1, engine.steps % 97], 3), engine.sequence([2], 3))
            for sequence in engine.step():
                engine.advance(sequence)
            waited += 1
        # 2 rounds of 3 steps for the 6 earlier sequences, 50 tokens at 8 a step shared with 3 others, 4 tokens.
        assert waited <= 6 + 12 + 4
        assert long.tokens == continued(range(50), 4)


@pytest.mark.parametrize("is_prefill", [False, True])
def test_a_short_prompt_overtakes_a_long_one_on_a_prefill_worker(is_prefill: bool) -> None:
    engine = PaperEngine(blocks=64, step_tokens=8, chunk_tokens=8)
    long = engine.sequence(range(80), 2, is_prefill=is_prefill)
    engine.add(long)
    engine.step()
    short = engine.sequence([5, 6, 7], 2, is_prefill=is_prefill)
    engine.add(short)
    engine.step()
    assert (short.num_computed == 3) == is_prefill
    assert 8 < long.num_computed < 24
    engine.run()
    assert long.tokens == continued(range(80), 2)


@pytest.mark.parametrize("batch", [1, 4])
def test_short_prompts_overtake_a_long_one_for_a_bounded_time(batch: int) -> None:
    engine = PaperEngine(blocks=64, batch=batch, step_tokens=8, chunk_tokens=8)
    long = engine.sequence(range(80), 1, is_prefill=True)
    engine.add(long, engine.sequence(range(8), 1, is_prefill=True))
    while long.lives:
        engine.add(engine.sequence([engine.steps % 97] * 8, 1, is_prefill=True))
        for sequence in engine.step():
            engine.advance(sequence)
        # Shorter prompts of PATIENCE times its 10 steps, and its own, besides a token for each of the batch.
        assert engine.steps <= PATIENCE * 10 + 10 + 10
    assert engine.steps > PATIENCE * 10


def test_a_prompt_in_the_cache_counts_as_short() -> None:
    engine = PaperEngine(blocks=64, batch=1, step_tokens=8, chunk_tokens=8)
    engine.add(engine.sequence(range(80), 1))
    engine.run()
    first, cached, other = (
        engine.sequence(tokens, 1, is_prefill=True)
        for tokens in (range(30, 50), range(80), range(50, 74))
    )
    engine.add(first)
    engine.step()
    engine.add(other, cached)
    order = []
    while engine.scheduler.has_work:
        for sequence in engine.step():
            order.append(sequence)
            engine.advance(sequence)
    assert order == [first, cached, other]


@pytest.mark.parametrize(
    ("low_priority", "high_priority", "steps", "bound"),
    [
        (0, 1, 256, 256),
        (0, 16, 16, 16 * 16),
        (0, 2**20, 16, 32 * 16),
        (-(2**31), 2**31 - 1, 16, 86 * 16),
    ],
)
def test_a_stream_of_higher_priority_delays_by_a_bound(
    low_priority: int, high_priority: int, steps: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer steps a priority where the bound is far."""
    assert PRIORITY_STEPS == 256
    monkeypatch.setattr("trtmesh.engine.scheduling.sequence.PRIORITY_STEPS", steps)
    engine = PaperEngine(blocks=16, batch=1)
    low = engine.sequence([1], 2, configure(priority=low_priority))
    engine.add(low)
    waited = 0
    while low.lives:
        engine.add(engine.sequence([2], 1, configure(priority=high_priority)))
        for sequence in engine.step():
            engine.advance(sequence)
        waited += 1
        assert waited <= bound + 3
    assert waited > bound - 3


def test_scheduler_tells_missing_blocks_from_missing_slots() -> None:
    engine = PaperEngine(blocks=10, batch=2, never_pause=True)
    large, short = engine.sequence([1] * 6, 30), engine.sequence([2] * 6, 1)
    engine.add(large, short)
    engine.step()
    assert engine.scheduler.lacks_blocks
    engine.scheduler.remove(short)
    assert not engine.scheduler.lacks_blocks
    engine.scheduler.remove(large)
    engine.add(*(engine.sequence([number], 2) for number in range(3)))
    engine.step()
    assert engine.scheduler.waiting_sequences == 1
    assert not engine.scheduler.lacks_blocks


def test_cancelled_waiting_sequences_are_dropped_from_a_stuck_queue() -> None:
    engine = PaperEngine(blocks=16, batch=1)
    engine.add(engine.sequence([1], 40))
    engine.step()
    stuck = [engine.sequence([2, number], 3) for number in range(4)]
    engine.add(*stuck)
    longest = 0
    for number in range(5000):
        cancelled = engine.sequence([3, number], 3)
        engine.add(cancelled)
        engine.scheduler.remove(cancelled)
        longest = max(longest, len(engine.scheduler._waiting._heap))
    assert longest <= 3 * len(stuck) + REMOVED_ENTRIES + 3
    engine.run()
    assert [each.tokens for each in stuck] == [continued([2, n], 3) for n in range(4)]


def test_blocks_are_counted_at_each_start_of_a_sequence_new_and_reused_ones() -> None:
    engine = PaperEngine(blocks=10, batch=4)
    group = [engine.sequence([*range(13), number], 14) for number in range(3)]
    engine.add(group[0])
    engine.step()
    engine.add(*group[1:])
    engine.run()
    scheduler, times = engine.scheduler, [each.times for each in group]
    assert scheduler.preemptions
    assert sum(each.new_blocks for each in times) == scheduler.new_blocks
    assert sum(each.reused_blocks for each in times) == scheduler.reused_blocks
    # The first start of each other sequence finds 3 blocks.
    assert scheduler.reused_blocks > 2 * 3


def test_priority_goes_before_arrival() -> None:
    engine = PaperEngine(blocks=16, batch=1)
    first, low, high = (
        engine.sequence([number], 2, configure(priority=priority))
        for number, priority in enumerate((0, -1, 1))
    )
    engine.add(first)
    engine.step()
    engine.add(low, high)
    engine.run()
    assert high.times.scheduled_ns < low.times.scheduled_ns


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 15), (14, 15), (-1, 0), (-17, -16), (-85, -84), (-1000, -500)]
)
def test_a_later_high_priority_starts_before_an_earlier_low_one(low: int, high: int) -> None:
    engine = PaperEngine(blocks=64, batch=1)
    first = engine.sequence([7], 6)
    early, late = (
        engine.sequence([number], 2, configure(priority=priority))
        for number, priority in enumerate((low, high))
    )
    for added in (first, early, late):
        engine.add(added)
        for sequence in engine.step():
            engine.advance(sequence)
    engine.run()
    assert first.times.scheduled_ns < late.times.scheduled_ns < early.times.scheduled_ns


PRIORITIES = st.integers(-(2**31), 2**31 - 1)


@given(PRIORITIES, PRIORITIES | st.integers(-64, 64))
def test_ranks_of_one_step_are_ordered_by_priority(one: int, other: int) -> None:
    engine = PaperEngine(blocks=16)
    sequences = [engine.sequence([1], 1, configure(priority=each)) for each in (one, other)]
    engine.add(*sequences)
    expected = sequences if one >= other else sequences[::-1]
    assert sorted(sequences, key=lambda each: each.rank) == expected


def test_blocks_out_of_a_sliding_window_are_free_for_others() -> None:
    engine = PaperEngine(blocks=40, window=6)
    sequence = engine.sequence(range(30), 20)
    engine.add(sequence)
    most = 0
    while engine.scheduler.has_work:
        for each in engine.step():
            engine.advance(each)
            if len(sequence.tokens) > 34:
                most = max(most, engine.pool.used_blocks)
    # 6 tokens touch at most 3 blocks; a block is released when the next is full.
    assert 1 <= most <= 4


def test_a_beginning_is_reused_as_far_as_its_next_token_sees_it() -> None:
    engine = PaperEngine(blocks=12, window=6)
    engine.add(engine.sequence(range(32), 1))
    engine.run()
    # Takes the 4 empty blocks and the 2 least recently used, the first of the prompt.
    engine.add(engine.sequence(range(50, 73), 1))
    engine.run()
    again = engine.sequence(range(32), 6)
    engine.add(again)
    engine.run()
    assert again.cached_prompt_tokens == 31
    assert again.tokens == continued(range(32), 6)


def test_a_fork_of_a_sequence_that_went_on_finds_no_blocks_that_it_left_behind() -> None:
    engine = PaperEngine(blocks=40, batch=2, window=6)
    first, second, third = (engine.sequence(range(20), count) for count in (30, 3, 12))
    second.leader = third.leader = first
    engine.add(first, second, third)
    engine.run()
    assert third.tokens == continued(range(20), 12)
