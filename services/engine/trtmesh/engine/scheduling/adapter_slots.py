"""Shares the adapter slots of a device fairly among waiting sequences, the same way for every backend.

A sequence with its adapter on the device goes to the scheduler's queue. Any other is parked until the adapter gets a
slot, from the longest unused adapter without sequences. Parked sequences get slots in the scheduler's order. A sequence
without a slot for PATIENCE_STEPS is starving: later newcomers in this order are parked too, so running sequences end
and free a slot.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from typing import Any, Generic, Protocol, TypeVar

from trtmesh.engine.adapter_store import StoredAdapter
from trtmesh.v1 import engine_pb2 as epb

PATIENCE_STEPS = 64
"""Sequences with an adapter on the device may overtake a parked sequence for so many steps."""

Order = tuple[int, ...]
"""Place in the scheduler's order, different for every sequence; the lowest starts first."""

A = TypeVar("A", bound=StoredAdapter)
A_contra = TypeVar("A_contra", bound=StoredAdapter, contravariant=True)
S = TypeVar("S")


class AdapterDevice(Protocol[A_contra]):
    """Moves adapters between host and device."""

    def bring(self, adapter: A_contra, slot: int) -> bool:
        """Copies an adapter into a slot; returns False where `arrived` or, after a failure, `drop` follows."""

    def note(self, adapter: A_contra) -> None:
        """Reports the adapter's new place."""


class AdapterSlots(Generic[A, S]):
    def __init__(self, slots: int, device: AdapterDevice[A], start: Callable[[S], None]) -> None:
        """`start` queues a sequence with its adapter on the device."""
        self.slots = slots
        self.hits = 0
        self._device = device
        self._start = start
        self._unused = list(range(slots))
        # On the device or under way there, with the slot; the longest unused first.
        self._residents: OrderedDict[A, int] = OrderedDict()
        self._under_way: set[A] = set()
        """Residents that have not arrived."""
        self._pinned: set[A] = set()
        """Those that were pinned when they were offered."""
        self._in_use: Counter[A] = Counter()
        """Adapters, with the number of started sequences."""
        self.parked: list[tuple[Order, int, A, S]] = []
        """In order, with the step of the sequence's arrival."""
        self._parked_of: dict[A, list[tuple[Order, int, A, S]]] = {}
        """The same by adapter: of thousands, an end concerns those with an adapter on the device."""
        self._steps = 0
        self._stuck: tuple[Order, int] | None = None
        """The first parked sequence without a slot."""

    @property
    def free(self) -> int:
        return len(self._unused)

    @property
    def evictable(self) -> int:
        """Idle adapters, counted from the others: a device may hold ten thousand."""
        # A list, because another thread may ask.
        kept = sum(map(self._is_kept, list(self._pinned)))
        return max(0, len(self._residents) - len(self._under_way) - len(self._in_use) - kept)

    def enter(self, adapter: A, order: Order, sequence: S) -> None:
        """Starts a sequence or parks it."""
        ready = adapter.place == epb.ADAPTER_PLACE_DEVICE
        self.hits += ready
        if ready and not self._is_held_back(order):
            self._release(adapter, sequence)
            return
        parked = order, self._steps, adapter, sequence
        insort(self.parked, parked, key=_order_of)
        insort(self._parked_of.setdefault(adapter, []), parked, key=_order_of)
        if self._stuck is None or order < self._stuck[0]:
            self._settle()

    def is_stuck(self, adapter: A, order: Order) -> bool:
        """Whether a sequence is parked until others end, not just until its adapter arrives."""
        arrives = adapter in self._residents and adapter.place != epb.ADAPTER_PLACE_DEVICE
        return not arrives and self._is_parked(order)

    def leave(self, adapter: A, order: Order) -> None:
        """Forgets a sequence, parked or started."""
        if self._is_parked(order):
            self._unpark(adapter, order)
        else:
            self._in_use[adapter] -= 1
            if self._in_use[adapter]:
                return
            del self._in_use[adapter]
        self._settle()

    def step(self, steps: int = 1) -> None:
        """Counts steps of the scheduler; needed only while sequences are parked."""
        self._steps += steps

    def offer(self, adapter: A) -> None:
        """Brings a loaded adapter to the device ahead of its sequences: to a free slot, a pinned one to any."""
        if adapter.pinned:
            self._pinned.add(adapter)
        if self.free or adapter.pinned:
            self._claim(adapter)
            self._settle()

    def arrived(self, adapter: A) -> None:
        """Starts the parked sequences of an adapter newly on the device."""
        if adapter in self._residents:
            self._under_way.discard(adapter)
            self._place(adapter, epb.ADAPTER_PLACE_DEVICE)
            self._settle(adapter)

    def waiting_for(self, adapter: A) -> list[S]:
        return [sequence for *_, sequence in self._parked_of.get(adapter, ())]

    def drop(self, adapter: A) -> None:
        """Frees the slot of an adapter without started sequences."""
        self._pinned.discard(adapter)
        if adapter in self._residents:
            self._under_way.discard(adapter)
            self._unused.append(self._residents.pop(adapter))
            self._settle()

    def _is_parked(self, order: Order) -> bool:
        at = self._place_of(order)
        return at < len(self.parked) and self.parked[at][0] == order

    def _place_of(self, order: Order) -> int:
        return bisect_left(self.parked, order, key=_order_of)

    def _unpark(self, adapter: A, order: Order) -> None:
        del self.parked[self._place_of(order)]
        mates = self._parked_of[adapter]
        del mates[bisect_left(mates, order, key=_order_of)]
        if not mates:
            del self._parked_of[adapter]

    def _is_held_back(self, order: Order) -> bool:
        stuck = self._stuck
        return stuck is not None and order > stuck[0] and self._steps - stuck[1] >= PATIENCE_STEPS

    def _settle(self, arrived: A | None = None) -> None:
        """Gives slots to the adapters of parked sequences, in order, and starts the sequences with an adapter there.

        All sequences of an adapter start with the arrival, so a turn serves as many as possible.
        """
        self._stuck = None
        turns, started = {arrived}, []
        for order, since, adapter, sequence in self.parked:
            waiting = adapter.place != epb.ADAPTER_PLACE_DEVICE
            if not self._claim(adapter):
                self._stuck = order, since
                break
            if adapter.place == epb.ADAPTER_PLACE_DEVICE:
                if waiting:
                    turns.add(adapter)
                started.append((adapter, order))
                self._release(adapter, sequence)
        for adapter, order in started:
            self._unpark(adapter, order)
        if self._stuck is not None:
            self._start_later(self._stuck, turns)

    def _start_later(self, stuck: tuple[Order, int], turns: Collection[A | None]) -> None:
        """Starts the sequences behind a stuck one, with their adapters on the device: if it starves, those of the
        adapters whose turn it is."""
        starves = self._steps - stuck[1] >= PATIENCE_STEPS
        ready = [
            parked
            for adapter in self._residents.keys() & self._parked_of.keys()
            if adapter.place == epb.ADAPTER_PLACE_DEVICE and (adapter in turns or not starves)
            for parked in self._parked_of[adapter]
        ]
        for order, _, adapter, sequence in sorted(ready, key=_order_of):
            self._unpark(adapter, order)
            self._release(adapter, sequence)

    def _release(self, adapter: A, sequence: S) -> None:
        self._in_use[adapter] += 1
        self._residents.move_to_end(adapter)
        self._start(sequence)

    def _claim(self, adapter: A) -> bool:
        """Takes a slot for an adapter on the host, if need be from an idle adapter. Returns whether any was free."""
        if adapter in self._residents:
            return True
        if not self._unused:
            victim = next((each for each in self._residents if self._is_idle(each)), None)
            if victim is None:
                return False
            self._unused.append(self._residents.pop(victim))
            self._place(victim, epb.ADAPTER_PLACE_HOST)
        slot = self._residents[adapter] = self._unused.pop()
        if self._device.bring(adapter, slot):
            self._place(adapter, epb.ADAPTER_PLACE_DEVICE)
        else:
            self._under_way.add(adapter)
        return True

    def _is_kept(self, adapter: A) -> bool:
        """Whether only its pin keeps an adapter on the device."""
        there = adapter in self._residents and adapter not in self._under_way
        return there and adapter.pinned and adapter not in self._in_use

    def _is_idle(self, adapter: A) -> bool:
        """Whether an adapter may be evicted: on the device, without sequences, not pinned."""
        return (
            adapter.place == epb.ADAPTER_PLACE_DEVICE
            and not adapter.pinned
            and adapter not in self._in_use
        )

    def _place(self, adapter: A, place: epb.AdapterPlace.ValueType) -> None:
        adapter.place = place
        self._device.note(adapter)


def _order_of(parked: tuple[Order, int, Any, Any]) -> Order:
    return parked[0]
