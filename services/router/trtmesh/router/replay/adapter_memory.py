"""Adapters in a simulated worker: a host cache and the slots on the device, both least recently used first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import AdapterNeed, Place, Residency
from trtmesh.router.placement.residency import AdapterKey

Key = TypeVar("Key")


@dataclass(slots=True)
class AdapterMemory:
    """Adapters by key. An adapter on the device is in host memory too, and none that an item needs is evicted."""

    slots: int
    host: int
    """Adapters in host memory; more only while items need them."""
    needed: Counter[AdapterKey] = field(default_factory=Counter)
    """Items of each adapter, running or waiting."""
    running: Counter[AdapterKey] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    """Running items by rank."""
    deliveries: int = 0
    copies: int = 0
    _loaded: OrderedDict[AdapterKey, AdapterNeed] = field(default_factory=OrderedDict)
    _device: OrderedDict[AdapterKey, None] = field(default_factory=OrderedDict)

    @property
    def rank(self) -> int:
        """Largest running rank."""
        return max(self.ranks, default=0)

    @property
    def held(self) -> Mapping[AdapterKey, Residency]:
        """The adapters as the worker reports them."""
        return {
            key: Residency(
                need.adapter, Place.DEVICE if key in self._device else Place.HOST, need.rank
            )
            for key, need in self._loaded.items()
        }

    @property
    def report(self) -> tuple[int, int, int]:
        """All slots, the free ones, and those of adapters not running."""
        used = len(self._device)
        return self.slots, self.slots - used, used - len(self.running)

    def holds(self, need: AdapterNeed) -> bool:
        return need.key in self._loaded

    def deliver(self, need: AdapterNeed) -> None:
        """An adapter arrived."""
        self.deliveries += 1
        self._loaded[need.key] = need
        self._shrink()

    def acquire(self, need: AdapterNeed) -> bool | None:
        """Takes a slot for an item; whether the adapter must be copied, or None while no slot is free."""
        key, copy = need.key, need.key not in self._device
        if copy:
            if len(self._device) == self.slots and not self._free_slot():
                return None
            self.copies += 1
            self._device[key] = None
        self._device.move_to_end(key)
        self._loaded.move_to_end(key)
        self.running[key] += 1
        self.ranks[need.rank] += 1
        return copy

    def release(self, need: AdapterNeed) -> None:
        """An item ended."""
        _leave(self.running, need.key)
        _leave(self.needed, need.key)
        _leave(self.ranks, need.rank)
        self._shrink()

    def _free_slot(self) -> bool:
        idle = next((key for key in self._device if key not in self.running), None)
        if idle is None:
            return False
        del self._device[idle]
        return True

    def _shrink(self) -> None:
        for key in [key for key in self._loaded if key not in self.needed]:
            if len(self._loaded) <= self.host:
                return
            del self._loaded[key]
            self._device.pop(key, None)


def _leave(counts: Counter[Key], key: Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def named(name: str, number: int, rank: int) -> AdapterNeed:
    """An adapter of a trace, whose content the simulated router has."""
    return AdapterNeed(Adapter(number, name, "replayed"), rank, deliverable=True)
