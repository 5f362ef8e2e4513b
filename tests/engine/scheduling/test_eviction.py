"""The order of eviction: retention, expiry, and offloading to the host."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from engine.scheduling.paper_engine import BLOCK, PaperEngine, continued
from engine.torch.harness import configure
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.block_hashes import ROOT_HASH
from trtmesh.chassis.vocabulary import TokenRangeRetention
from trtmesh.engine.backend import BlocksRemoved, BlocksStored
from trtmesh.engine.scheduling.blocks import DEFAULT, BlockPool, EvictionOrder, Prefix, Retention
from trtmesh.engine.service.streams import KvMirror


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def order_of(*retentions: Retention, at: float = 0.0) -> list[int]:
    """The order in which numbers added with `retentions` are evicted at a time."""
    clock = Clock()
    order = EvictionOrder(clock)
    for number, retention in enumerate(retentions):
        order.add(number, retention)
    clock.now = at
    return [order.pop()[0] for _ in retentions]


def test_the_lowest_priority_goes_first_and_among_equals_the_oldest() -> None:
    retentions = [Retention(80), DEFAULT, Retention(0), DEFAULT, Retention(80)]
    assert order_of(*retentions) == [2, 1, 3, 0, 4]


def test_a_priority_whose_time_is_over_is_the_default() -> None:
    retentions = [Retention(100, seconds=5), Retention(36), Retention(0, seconds=5), DEFAULT]
    assert order_of(*retentions, at=4.9) == [2, 3, 1, 0]
    assert order_of(*retentions, at=5.0) == [3, 0, 2, 1]


def test_a_discarded_number_returns_with_what_it_is_given_then() -> None:
    clock = Clock()
    order = EvictionOrder(clock)
    order.add(1, Retention(90, seconds=2))
    assert order.discard(1) == Retention(90, seconds=2, expiry=2)
    order.add(1, Retention(90, seconds=9))
    order.add(2, Retention(50))
    # The first retention has expired, the second has not.
    clock.now = 3
    assert order.pop()[0] == 2
    order.add(2, Retention(50))
    clock.now = 9
    assert order.discard(1) == DEFAULT
    assert (len(order), 1 in order, 2 in order) == (1, False, True)


def test_eviction_order_does_not_grow_with_discarded_blocks() -> None:
    order = EvictionOrder(Clock())
    for _ in range(1000):
        order.add(1, Retention(90, seconds=1e6))
        order.discard(1)
    assert len(order._expiries) < 100


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "discard", "pop"]),
            st.integers(0, 9),
            st.sampled_from([0, 35, 36, 90]),
            st.sampled_from([None, 0.9, 3.2]),
        ),
        max_size=80,
    )
)
def test_eviction_order_equals_a_sorted_list(operations: list[tuple[str, int, int, Any]]) -> None:
    clock = Clock()
    order = EvictionOrder(clock)
    # Number, priority, end of the priority; in order of coming.
    model: list[tuple[int, int, float]] = []
    for kind, number, priority, seconds in operations:
        clock.now += 1
        over = sorted((each for each in model if each[2] <= clock.now), key=lambda each: each[2])
        model = [each for each in model if each not in over]
        model += [(each[0], 35, math.inf) for each in over]
        there = [each[0] for each in model]
        if kind == "add" and number not in there:
            order.add(number, Retention(priority, seconds))
            timed = seconds is not None and priority != 35
            model.append((number, priority, clock.now + seconds if timed else math.inf))
        elif kind == "discard" and number in there:
            at = there.index(number)
            assert order.discard(number).priority == model.pop(at)[1]
        elif kind == "pop" and model:
            first = min(model, key=lambda each: each[1])
            model.remove(first)
            popped, retention = order.pop()
            assert (popped, retention.priority) == first[:2]
        assert len(order) == len(model)


def retained(engine: PaperEngine, prompt: list[int], **wishes: Any) -> None:
    """Runs a sequence with these retention wishes to the end."""
    engine.add(engine.sequence(prompt, 6, configure(**wishes)))
    engine.run()


def cached(engine: PaperEngine, tokens: list[int]) -> int:
    """Cached tokens of a beginning."""
    probe = engine.sequence([*tokens, 0], 1)
    return engine.scheduler._prefixes.find(probe).tokens


def fill(engine: PaperEngine, blocks: int, start: int) -> None:
    """Needs this many other blocks."""
    retained(engine, list(range(start, start + BLOCK * blocks - 5)))


FIRST, SECOND = list(range(12)), list(range(20, 32))


def test_token_ranges_keep_the_covered_blocks() -> None:
    engine = PaperEngine(blocks=9)
    ranges = (TokenRangeRetention(0, 8, 80),)
    retained(engine, FIRST, token_ranges=ranges)
    retained(engine, SECOND)
    fill(engine, 7, 50)
    assert (cached(engine, FIRST), cached(engine, SECOND)) == (8, 0)


def test_a_range_without_an_end_covers_the_prompt_and_no_more() -> None:
    engine = PaperEngine(blocks=9)
    retained(engine, FIRST, token_ranges=(TokenRangeRetention(0, None, 80),))
    fill(engine, 6, 50)
    whole = continued(FIRST, 6)
    assert (cached(engine, FIRST), cached(engine, whole)) == (12, 12)


def test_low_priority_is_evicted_before_older_blocks() -> None:
    engine = PaperEngine(blocks=9)
    retained(engine, FIRST)
    retained(engine, SECOND, token_ranges=(TokenRangeRetention(0, None, 0),), decode_priority=0)
    fill(engine, 5, 50)
    assert (cached(engine, FIRST), cached(engine, SECOND)) == (12, 0)


def test_the_decode_priority_keeps_what_was_generated() -> None:
    engine = PaperEngine(blocks=9)
    retained(engine, FIRST, token_ranges=(TokenRangeRetention(0, None, 80),), decode_priority=90)
    fill(engine, 5, 50)
    assert cached(engine, continued(FIRST, 6)) == 16


@pytest.mark.parametrize(("waited", "kept"), [(0.9, 12), (1.0, 0)])
def test_a_duration_counts_from_the_release(waited: float, kept: int) -> None:
    engine = PaperEngine(blocks=9)
    wishes = (TokenRangeRetention(0, None, 80, duration_ms=1000),)
    sequence = engine.sequence(FIRST, 6, configure(token_ranges=wishes))
    engine.add(sequence)
    engine.step()
    engine.now += 50
    engine.scheduler.remove(sequence)
    engine.now += waited
    # With the default priority the older goes first.
    retained(engine, SECOND)
    fill(engine, 6, 50)
    assert cached(engine, FIRST) == kept


def priorities(engine: PaperEngine) -> set[int]:
    """Of idle blocks."""
    return {retention.priority for retention in engine.pool._idle._retention_of.values()}


def test_a_duration_is_renewed_by_wishes_and_not_by_use() -> None:
    engine = PaperEngine(blocks=30)
    wishes = (TokenRangeRetention(0, None, 80, duration_ms=10_000),)
    retained(engine, FIRST, token_ranges=wishes)
    for _ in range(2):
        engine.now += 4
        retained(engine, FIRST)
    assert 80 in priorities(engine)
    engine.now += 2
    retained(engine, FIRST)
    assert priorities(engine) == {35}
    retained(engine, FIRST, token_ranges=wishes)
    engine.now += 9
    assert cached(engine, FIRST) == 12
    assert 80 in priorities(engine)


def test_block_used_beyond_its_duration_has_the_default_priority() -> None:
    engine = PaperEngine(blocks=30)
    wishes = (TokenRangeRetention(0, None, 80, duration_ms=10_000),)
    retained(engine, FIRST, token_ranges=wishes)
    user = engine.sequence(FIRST, 6)
    engine.add(user)
    engine.step()
    engine.now += 11
    engine.scheduler.remove(user)
    assert priorities(engine) == {35}


@pytest.mark.parametrize("wishing", [0, 1])
@pytest.mark.parametrize("together", [True, False])
def test_a_wish_holds_whoever_published_first(together: bool, wishing: int) -> None:
    engine = PaperEngine(blocks=30)
    wishes = configure(token_ranges=(TokenRangeRetention(0, None, 80),))
    for number in range(2):
        config = wishes if number == wishing else configure()
        engine.add(engine.sequence([*FIRST, 1], 2, config))
        if not together:
            engine.run()
    engine.run()
    of_prompt = [engine.pool._idle._retention_of[n].priority for n in published(engine, FIRST)]
    assert of_prompt == [80] * 3


def published(engine: PaperEngine, tokens: list[int]) -> list[int]:
    """The blocks of a beginning."""
    probe = engine.sequence([*tokens, 0], 1)
    return engine.scheduler._prefixes.find(probe).blocks


def test_the_decode_duration_ends_too() -> None:
    engine = PaperEngine(blocks=9)
    retained(engine, FIRST, decode_priority=90, decode_duration_ms=1000)
    engine.now += 1
    fill(engine, 9, 50)
    assert cached(engine, continued(FIRST, 6)) == 0


def test_a_later_wish_overrides_and_no_wish_leaves_it() -> None:
    engine = PaperEngine(blocks=9)
    retained(engine, FIRST, token_ranges=(TokenRangeRetention(0, None, 80),))
    retained(engine, [*FIRST, 1])
    fill(engine, 6, 50)
    assert cached(engine, FIRST) == 12
    retained(engine, [*FIRST, 1], token_ranges=(TokenRangeRetention(0, None, 0),))
    fill(engine, 6, 70)
    assert cached(engine, FIRST) == 0


def test_evicted_blocks_move_to_the_host_and_back() -> None:
    engine = PaperEngine(blocks=6, host_blocks=6)
    retained(engine, FIRST)
    fill(engine, 6, 50)
    assert cached(engine, FIRST) == 12
    assert engine.pool.used_host_blocks > 0
    before = engine.scheduler.computed_prompt_tokens
    # The engine checks every token read.
    retained(engine, [*FIRST, 1])
    assert engine.scheduler.computed_prompt_tokens - before == 1


def test_part_of_a_block_on_the_host_is_copied_and_stays_there() -> None:
    engine = PaperEngine(blocks=6, host_blocks=6)
    retained(engine, FIRST)
    fill(engine, 6, 50)
    on_host = engine.pool.used_host_blocks
    retained(engine, [0, 1, 9])
    assert engine.scheduler.reused_prompt_tokens == 2
    assert engine.pool.used_host_blocks >= on_host
    assert cached(engine, FIRST) == 12


def test_only_priorities_that_are_worth_it_go_to_the_host() -> None:
    for priority, kept in ((35, 12), (34, 0)):
        engine = PaperEngine(blocks=6, host_blocks=6)
        retained(engine, FIRST, token_ranges=(TokenRangeRetention(0, None, priority),))
        fill(engine, 6, 50)
        assert cached(engine, FIRST) == kept


def test_the_host_gives_up_the_lowest_priority_too() -> None:
    engine = PaperEngine(blocks=6, host_blocks=6)
    retained(engine, FIRST, token_ranges=(TokenRangeRetention(0, None, 80),))
    for start in (30, 50, 70):
        fill(engine, 6, start)
    assert cached(engine, FIRST) == 12


def test_events_tell_what_can_be_reused_wherever_it_lies() -> None:
    engine = PaperEngine(blocks=6, host_blocks=4)
    mirror = KvMirror()
    draw = random.Random(5)
    for _ in range(40):
        retained(engine, [draw.randrange(3)] * 8 + [draw.randrange(97)] * draw.randrange(8))
        mirror.record(engine.pool.take_events())
        stored = [
            each
            for event in mirror.snapshot()
            if isinstance(event, BlocksStored)
            for each in event.block_hashes
        ]
        assert sorted(stored) == sorted(engine.pool.published._by_hash)
    assert len(mirror._blocks) > 6


def test_a_move_to_the_host_is_no_removal() -> None:
    pool = BlockPool(1, host_blocks=1)
    (block,) = pool.allocate(1)
    pool.publish(block, 10, ROOT_HASH, [1])
    pool.release([block])
    (other,) = pool.allocate(1)
    assert pool.take_events() == [BlocksStored(ROOT_HASH, [10], [1])]
    pool.publish(other, 11, ROOT_HASH, [2])
    pool.release([other])
    pool.allocate(1)
    assert pool.take_events() == [BlocksStored(ROOT_HASH, [11], [2]), BlocksRemoved([10])]


def test_a_beginning_that_waits_on_the_host_needs_a_block_for_each() -> None:
    pool = BlockPool(2, host_blocks=2)
    blocks = pool.allocate(2)
    for number, block in enumerate(blocks):
        pool.publish(block, 10 + number, ROOT_HASH if not number else 9 + number, [number])
    pool.release(blocks)
    held = pool.allocate(2)
    away = [pool.published.find(10) or 0, pool.published.find(11) or 0]
    assert min(away) > 2
    assert not pool.can_allocate(0, beside=Prefix(away, 2))
    pool.release(held)
    assert pool.can_allocate(0, beside=Prefix(away, 2))
    assert not pool.can_allocate(1, beside=Prefix(away, 2))
    assert sorted(pool.begin(Prefix(away, 2))) == [1, 2]
