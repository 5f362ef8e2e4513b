"""Adapters on a worker: where each version is, as the worker reports it, and which ones this router's sequences use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Self, TypeAlias

from trtmesh.chassis.vocabulary import Adapter

AdapterKey: TypeAlias = tuple[int, str]
"""Number and version of an adapter."""

FALLBACK_DELIVERY_SECONDS, FALLBACK_COPY_SECONDS = 0.5, 0.02
"""Load times before any was seen."""


class Place(Enum):
    """Memory of a worker."""

    HOST = "host"
    """Ready to be copied to the device."""
    DEVICE = "device"
    """Ready to run."""


@dataclass(frozen=True, slots=True)
class Residency:
    """A version of an adapter in a worker's memory."""

    adapter: Adapter
    place: Place = Place.DEVICE
    rank: int = 0
    """Largest rank of the updates; 0 for unknown."""
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class AdapterOutlook:
    """The fleet's experience with an adapter."""

    homes: tuple[str, ...] = ()
    """Addresses of the workers meant to hold the adapter at its present share of the load; empty without a share."""
    stretch: tuple[float, float] = (0.0, 1.0)
    """Part of the line of workers that belongs to the adapter's rank."""
    delivery_seconds: float = FALLBACK_DELIVERY_SECONDS
    """Predicted time from the content to an adapter in a worker's memory."""
    copy_seconds: float = FALLBACK_COPY_SECONDS
    """Predicted time from host memory to the device."""
    rank_step_seconds: float = 0.0
    """Predicted time per step and unit of the batch's largest rank."""

    @property
    def replicas(self) -> int:
        return len(self.homes) or 1


@dataclass(frozen=True, slots=True)
class AdapterNeed:
    """The adapter of an item. The fleet adds `outlook`."""

    adapter: Adapter
    rank: int = 0
    """Largest rank of the updates; 0 for unknown."""
    deliverable: bool = False
    """Whether this router has the content; otherwise only holders can take the item."""
    outlook: AdapterOutlook = AdapterOutlook()

    @property
    def key(self) -> AdapterKey:
        return self.adapter.id, self.adapter.version


@dataclass(frozen=True, slots=True)
class Use:
    """Live sequences of this router with an adapter on a worker."""

    sequences: int
    rank: int


@dataclass(frozen=True, slots=True)
class WorkerAdapters:
    """Residency as reported, and uses as booked: an adapter in use that is not held is being delivered."""

    held: Mapping[AdapterKey, Residency] = field(default_factory=dict)
    slots: int = 0
    """Most adapters ready to run at once; 0 without support for adapters."""
    free_slots: int = 0
    evictable_slots: int = 0
    """Slots of adapters neither pinned nor used by a sequence of any router."""
    in_use: Mapping[AdapterKey, Use] = field(default_factory=dict)
    rank: int = 0
    """Largest rank in use."""

    def holds(self, adapter: Adapter) -> bool:
        """Whether this version of an adapter is in memory."""
        return (adapter.id, adapter.version) in self.held

    def place(self, need: AdapterNeed) -> Place | None:
        """Where an adapter is; None outside memory."""
        residency = self.held.get(need.key)
        return residency.place if residency else None

    def is_full(self, need: AdapterNeed) -> bool:
        """Whether each slot is pinned or in use by other adapters. Slots are unknown before the first report."""
        if not self.slots or need.key in self.in_use or self.place(need) is Place.DEVICE:
            return False
        pinned = {key for key, r in self.held.items() if r.pinned and r.place is Place.DEVICE}
        # The report lags behind the bookings of this router, which in turn miss those of others.
        reported = self.slots - self.free_slots - self.evictable_slots
        return max(reported, len(pinned | self.in_use.keys())) >= self.slots

    def deliveries(self, besides: AdapterNeed) -> int:
        """Other adapters being delivered."""
        return sum(key not in self.held and key != besides.key for key in self.in_use)

    def reported(self, slots: int, free: int, evictable: int) -> Self:
        """The adapters after a load report."""
        if (slots, free, evictable) == (self.slots, self.free_slots, self.evictable_slots):
            return self
        return replace(self, slots=slots, free_slots=free, evictable_slots=evictable)

    def moved(self, held: Mapping[AdapterKey, Residency]) -> Self:
        """The adapters after changed residencies."""
        return replace(self, held=held)

    def used(self, need: AdapterNeed, sequences: int) -> Self:
        """The adapters with that many sequences more with an adapter, or fewer."""
        in_use = dict(self.in_use)
        before = in_use.pop(need.key, Use(0, need.rank))
        if before.sequences + sequences > 0:
            in_use[need.key] = Use(before.sequences + sequences, need.rank or before.rank)
        return replace(self, in_use=in_use, rank=max((u.rank for u in in_use.values()), default=0))

    def lost(self) -> Self:
        """The adapters after the loss of the worker: bookings are released on their own."""
        return replace(self, held={}, slots=0, free_slots=0, evictable_slots=0)


NO_ADAPTERS = WorkerAdapters()
