"""Adapters on a worker: the place of each version, as reported by the worker, and the versions used by this router's
sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Self, TypeAlias

from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.values.persistent_map import PersistentMap

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

    @property
    def names(self) -> tuple[int | str, ...]:
        """The names of the adapter in requests: the number, and the name if any."""
        number, name = self.adapter.id, self.adapter.name
        return (number, name) if name else (number,)


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
    key: AdapterKey = field(init=False)
    """Read a dozen times for an item."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", (self.adapter.id, self.adapter.version))


@dataclass(frozen=True, slots=True)
class Use:
    """Live sequences of this router with an adapter on a worker."""

    sequences: int
    rank: int


_NONE: PersistentMap[Any, Any] = PersistentMap({})


def _none() -> PersistentMap[Any, Any]:
    return _NONE


@dataclass(frozen=True, slots=True)
class WorkerAdapters:
    """Residency as reported, and uses as booked: a used adapter that is not held is being delivered.

    A change shares all but the changed adapters: a worker may hold ten thousand.
    """

    held: PersistentMap[AdapterKey, Residency] = field(default_factory=_none)
    slots: int = 0
    """Most adapters ready to run at once; 0 without support for adapters."""
    free_slots: int = 0
    evictable_slots: int = 0
    """Slots of adapters neither pinned nor used by a sequence of any router."""
    in_use: PersistentMap[AdapterKey, Use] = field(default_factory=_none)
    rank: int = 0
    """Largest rank in use."""
    named: PersistentMap[int | str, tuple[AdapterKey, ...]] = field(default_factory=_none)
    """Held adapters by number, and by name."""
    pinned: frozenset[AdapterKey] = frozenset()
    """Held adapters that are pinned."""
    deliveries: int = 0
    """Adapters being delivered."""
    ranks: Mapping[int, int] = field(default_factory=dict)
    """Adapters in use by rank."""

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
        kept = sum(
            key not in self.in_use and self.held[key].place is Place.DEVICE for key in self.pinned
        )
        # The report lags behind the bookings of this router, which in turn miss those of others.
        reported = self.slots - self.free_slots - self.evictable_slots
        return max(reported, len(self.in_use) + kept) >= self.slots

    def reported(self, slots: int, free: int, evictable: int) -> Self:
        """The adapters after a load report."""
        if (slots, free, evictable) == (self.slots, self.free_slots, self.evictable_slots):
            return self
        return replace(self, slots=slots, free_slots=free, evictable_slots=evictable)

    def moved(self, changes: Mapping[AdapterKey, Residency | None]) -> Self:
        """The adapters after changed residencies; None for one that left memory."""
        added = {key: residency for key, residency in changes.items() if residency}
        held = self.held.changed([key for key in changes if key not in added], added)
        pinned = self.pinned.difference(changes) | {key for key, r in added.items() if r.pinned}
        deliveries = self.deliveries
        named: dict[int | str, tuple[AdapterKey, ...]] = {}
        for key, residency in changes.items():
            before = self.held.get(key)
            if key in self.in_use:
                deliveries += (before is not None) - (residency is not None)
            if before and residency and before.adapter == residency.adapter:
                continue
            for name in before.names if before else ():
                known = named.get(name, self.named.get(name, ()))
                named[name] = tuple(each for each in known if each != key)
            for name in residency.names if residency else ():
                named[name] = (*named.get(name, self.named.get(name, ())), key)
        nameless = [name for name, keys in named.items() if not keys]
        return replace(
            self,
            held=held,
            pinned=pinned,
            deliveries=deliveries,
            named=self.named.changed(nameless, {n: keys for n, keys in named.items() if keys}),
        )

    def used(self, need: AdapterNeed, sequences: int) -> Self:
        """The adapters with that many sequences more with an adapter, or fewer."""
        before = self.in_use.get(need.key, Use(0, need.rank))
        after = Use(before.sequences + sequences, need.rank or before.rank)
        is_used, was_used = after.sequences > 0, before.sequences > 0
        ranks = dict(self.ranks)
        for rank, more in ((before.rank, -was_used), (after.rank, is_used)):
            ranks[rank] = ranks.get(rank, 0) + more
            if not ranks[rank]:
                del ranks[rank]
        in_use = self.in_use.changed(
            [] if is_used else [need.key], {need.key: after} if is_used else {}
        )
        return replace(
            self,
            in_use=in_use,
            ranks=ranks,
            rank=max(ranks, default=0),
            deliveries=self.deliveries + (need.key not in self.held) * (is_used - was_used),
        )

    def lost(self) -> Self:
        """The adapters after the loss of the worker: bookings are released on their own."""
        lost = type(self)(in_use=self.in_use, rank=self.rank, ranks=self.ranks)
        return replace(lost, deliveries=len(self.in_use))


NO_ADAPTERS = WorkerAdapters()
