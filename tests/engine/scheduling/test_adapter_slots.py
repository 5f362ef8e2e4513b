"""Slots for adapters: every sequence gets its turn within a bound of steps, and no used adapter loses its slot."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from counting import counted_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import examples
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.engine.scheduling.adapter_slots import PATIENCE_STEPS, AdapterSlots, Order
from trtmesh.v1 import engine_pb2 as epb


@dataclass
class Paper:
    """A sequence of a number of steps."""

    adapter: StoredAdapter
    order: Order
    steps: int
    arrived_at: int
    started_at: int = -1


@dataclass
class PaperScheduler:
    """Runs every started sequence at once; copies to the device take `copy_steps`."""

    slots_count: int
    copy_steps: int = 0
    now: int = 0
    running: list[Paper] = field(default_factory=list)
    copying: list[tuple[int, StoredAdapter]] = field(default_factory=list)
    occupied: dict[int, StoredAdapter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots: AdapterSlots[StoredAdapter, Paper] = AdapterSlots(
            self.slots_count, self, self.start
        )

    def start(self, sequence: Paper) -> None:
        assert sequence.adapter.place == epb.ADAPTER_PLACE_DEVICE
        sequence.started_at = self.now
        self.running.append(sequence)

    def bring(self, adapter: StoredAdapter, slot: int) -> bool:
        previous = self.occupied.get(slot)
        assert all(each.adapter is not previous for each in self.running), "evicted while in use"
        assert previous is None or not previous.pinned
        self.occupied[slot] = adapter
        if self.copy_steps:
            self.copying.append((self.now + self.copy_steps, adapter))
        return not self.copy_steps

    def note(self, adapter: StoredAdapter) -> None:
        residents = [a for a in self.occupied.values() if a.place == epb.ADAPTER_PLACE_DEVICE]
        assert len(residents) <= self.slots_count

    def step(self) -> None:
        self.now += 1
        self.slots.step()
        for at, adapter in [each for each in self.copying if each[0] <= self.now]:
            self.copying.remove((at, adapter))
            self.slots.arrived(adapter)
        for sequence in list(self.running):
            sequence.steps -= 1
            if not sequence.steps:
                self.running.remove(sequence)
                self.slots.leave(sequence.adapter, sequence.order)
        used = {id(each.adapter) for each in self.running}
        on_device = [a for a in self.occupied.values() if a.place == epb.ADAPTER_PLACE_DEVICE]
        idle = [a for a in on_device if not a.pinned and id(a) not in used]
        assert self.slots.evictable == len(idle)


def adapters(count: int) -> list[StoredAdapter]:
    return [
        StoredAdapter(identity=Adapter(number), rank=8, size_bytes=1) for number in range(count)
    ]


@given(
    st.integers(0, 2**32), st.integers(1, 4), st.integers(0, 3), st.integers(1, 20), st.booleans()
)
@settings(max_examples=examples(40, soak=150), deadline=None)
def test_no_sequence_starves(
    seed: int, slots: int, copy_steps: int, longest: int, popular: bool
) -> None:
    """One adapter alone would keep every slot for ever; all others get their turn within a bound."""
    draw, scheduler, known = random.Random(seed), PaperScheduler(slots, copy_steps), adapters(12)
    asked: list[Paper] = []
    for _ in range(400):
        for _ in range(draw.randrange(3) + popular * slots):
            adapter = draw.choice(known[:slots] if popular and draw.random() < 0.9 else known)
            sequence = Paper(adapter, (len(asked),), draw.randint(1, longest), scheduler.now)
            asked.append(sequence)
            scheduler.slots.enter(adapter, sequence.order, sequence)
        scheduler.step()
    steps = 0
    while any(each.started_at < 0 for each in asked):
        scheduler.step()
        steps += 1
        assert steps < len(asked) * (longest + copy_steps + 1) + PATIENCE_STEPS
    # A turn takes the longest sequence and a copy; the adapters of older sequences come first, each once.
    bound = PATIENCE_STEPS + (len(known) + 1) * (longest + copy_steps + 2)
    assert max(each.started_at - each.arrived_at for each in asked) <= bound
    assert scheduler.slots.parked == []


def test_starving_sequence_is_overtaken_for_a_bounded_time_only() -> None:
    hot, cold = adapters(2)
    scheduler = PaperScheduler(1)
    scheduler.slots.enter(hot, (0,), Paper(hot, (0,), 3, 0))
    waiting = Paper(cold, (1,), 1, 0)
    scheduler.slots.enter(cold, (1,), waiting)
    for number in range(2, 200):
        late = Paper(hot, (number,), 3, scheduler.now)
        scheduler.slots.enter(hot, (number,), late)
        scheduler.step()
        assert waiting.started_at >= 0 or (late.started_at >= 0) == (number - 2 < PATIENCE_STEPS)
        if waiting.started_at >= 0:
            break
    assert waiting.started_at <= PATIENCE_STEPS + 3


def test_slot_of_the_longest_unused_goes_first_and_never_a_pinned_one() -> None:
    first, second, third = adapters(3)
    first.pinned = True
    scheduler = PaperScheduler(2)
    for number, adapter in enumerate((first, second)):
        scheduler.slots.offer(adapter)
        assert adapter.place == epb.ADAPTER_PLACE_DEVICE, number
    scheduler.slots.offer(third)
    assert third.place == epb.ADAPTER_PLACE_HOST
    assert (scheduler.slots.free, scheduler.slots.evictable) == (0, 1)
    scheduler.slots.enter(third, (1,), Paper(third, (1,), 1, 0))
    assert [each.place == epb.ADAPTER_PLACE_DEVICE for each in (first, second, third)] == [
        True,
        False,
        True,
    ]
    assert scheduler.slots.hits == 0


@pytest.mark.parametrize("gone", ["stopped", "dropped"])
def test_sequence_that_leaves_while_its_adapter_is_copied(gone: str) -> None:
    first, second = adapters(2)
    scheduler = PaperScheduler(1, copy_steps=2)
    scheduler.slots.enter(first, (0,), Paper(first, (0,), 1, 0))
    scheduler.slots.leave(first, (0,))
    if gone == "dropped":
        scheduler.slots.drop(first)
    other = Paper(second, (1,), 1, 0)
    scheduler.slots.enter(second, (1,), other)
    for _ in range(6):
        scheduler.step()
    assert other.started_at >= 0
    assert scheduler.slots.parked == []


def test_an_end_costs_as_much_with_ten_thousand_parked_sequences() -> None:
    costs = []
    for count in (100, 10_000):
        paper = PaperScheduler(4)
        adapters = [
            StoredAdapter(identity=Adapter(n, "", "v"), rank=8, size_bytes=1) for n in range(count)
        ]
        for n, adapter in enumerate(adapters):
            paper.slots.enter(adapter, (n,), Paper(adapter, (n,), 1, 0))
        assert len(paper.slots.parked) == count - 4
        with counted_lines() as lines:
            for _ in range(20):
                ended = paper.running.pop(0)
                paper.slots.leave(ended.adapter, ended.order)
        costs.append(lines.count)
        assert len(paper.slots.parked) == count - 24
    few, many = costs
    # Places in the list are found by halving it.
    assert 100 < many < 2 * few
