"""The homes of adapters: the workers meant to hold each, by rendezvous hashing with bounded loads.

Each adapter has an order of workers: first the workers of the rank's stretch, then by distance, and among equals by
weighted rendezvous hashing of the adapter's number, so a new version stays in the place of the old version. In the
order of their loads the adapters take their homes: the first workers with a free slot and a load within 1.25 times the
mean (consistent hashing with bounded loads; Mirrokni et al., 2018). Loads are shares of the recent past, not momentary
queues: otherwise every burst would move adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trtmesh.router.placement.rendezvous import ranked

BOUND = 1.25
"""Most load of a worker relative to the mean."""

KEEP = 0.1
"""Further load, relative to the mean, up to which a worker keeps a resident adapter."""

WILLING = (False, 0.0)
"""The reluctance of a worker that takes a part of the load."""

Stretch = tuple[float, float]
"""Begin and end of a part of the line of workers, whose whole is 0 to 1."""

EVERYWHERE: Stretch = (0.0, 1.0)

Takers = tuple[tuple[str, int], ...]
"""The workers that take adapters, as address and slots."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """An adapter's share of the load, on its number of replicas."""

    adapter: int
    share: float
    replicas: int = 1
    stretch: Stretch = EVERYWHERE


def homes_of(
    loads: Iterable[AdapterLoad], takers: Takers, before: Mapping[int, Sequence[str]]
) -> dict[int, tuple[str, ...]]:
    """Homes by adapter, for adapters in descending order of load; `before` are the present ones."""
    rooms = {address: _Room(slots, len(takers)) for address, slots in takers}
    homes = {}
    for load in loads:
        part, present = load.share / load.replicas, before.get(load.adapter, ())
        ranking: dict[str, tuple[bool, float]] = {}
        willing = 0
        for address in order_of(takers, load.adapter, load.stretch):
            ranking[address] = rooms[address].reluctance(part, present=address in present)
            willing += ranking[address] == WILLING
            if willing == load.replicas:
                # No later worker is less reluctant.
                break
        homes[load.adapter] = tuple(sorted(ranking, key=ranking.__getitem__)[: load.replicas])
        for address in homes[load.adapter]:
            rooms[address].take(part)
    return homes


@dataclass(slots=True)
class _Room:
    """What a worker still takes."""

    slots: int
    workers: int
    load: float = 0.0

    def reluctance(self, part: float, *, present: bool) -> tuple[bool, float]:
        """0 for a worker that takes a part of the load; then workers without a slot, then the least loaded."""
        most = (BOUND + KEEP * present) / self.workers
        if self.load + part > most:
            return True, self.load
        return False, float(self.slots <= 0)

    def take(self, part: float) -> None:
        self.load += part
        self.slots -= 1


@lru_cache(2**14)
def order_of(takers: Takers, adapter: int, stretch: Stretch = EVERYWHERE) -> tuple[str, ...]:
    """The addresses in an adapter's order."""
    if not takers:
        return ()
    line = sorted(address for address, _ in takers)
    first = min(round(stretch[0] * len(line)), len(line) - 1)
    last = max(first, round(stretch[1] * len(line)) - 1)
    distance = {address: max(first - at, at - last, 0) for at, address in enumerate(line)}
    hashed = [takers[n][0] for n in ranked(takers, adapter)]
    return tuple(sorted(hashed, key=lambda address: distance[address]))
