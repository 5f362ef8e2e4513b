"""Shares of adapters in the recent load, and the homes that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappush, heapreplace, nlargest
from itertools import accumulate
from math import ceil

from trtmesh.router.placement.homes import EVERYWHERE, AdapterLoad, Stretch, Takers, homes_of
from trtmesh.router.placement.rates import Typical
from trtmesh.router.placement.residency import AdapterNeed, AdapterOutlook

HALF_LIFE_SECONDS = 30.0
LARGEST_UNIT = 2.0**20
"""Weight of a new second relative to the oldest before all weights are rescaled."""
MOST_HALVINGS = 512.0
"""After an idle time longer than these, older load counts nothing."""

LEAST_SHARE = 1e-6
"""Smallest share that is remembered."""

SLACK = 0.25
"""How far, in workers, the demand for an adapter must fall before a replica is given up."""

WORTH_BEGIN, WORTH_END = 0.2, 0.1
"""Cost of the spread of the ranks, as a part of a step, from which and up to which ranks are kept apart."""

MOST_HOMED = 1024
"""Adapters with homes of their own load; the others have the first of their order."""


class Hottest:
    """The adapters of most weight. Weights only grow, so an adapter that rises needs to be compared with the coldest of
    them alone."""

    def __init__(self, most: int, weights: Mapping[int, tuple[float, int]]) -> None:
        self.most = most
        self._weights = weights
        self._heap = [(weights[each][0], each) for each in nlargest(most, weights, self._order)]
        """The coldest first, by their weights when they were last compared."""
        heapify(self._heap)
        self._members = {each for _, each in self._heap}

    def _order(self, adapter: int) -> tuple[float, int]:
        return self._weights[adapter][0], adapter

    def rose(self, adapter: int) -> None:
        """The weight of an adapter has grown."""
        if adapter in self._members or not self.most:
            return
        if len(self._heap) < self.most:
            heappush(self._heap, self._order(adapter))
            self._members.add(adapter)
            return
        while (now := self._order(coldest := self._heap[0][1])) != self._heap[0]:
            heapreplace(self._heap, now)
        if self._order(adapter) > now:
            heapreplace(self._heap, self._order(adapter))
            self._members.remove(coldest)
            self._members.add(adapter)

    def in_order(self) -> list[int]:
        """The hottest first."""
        return sorted(self._members, key=self._order, reverse=True)


class AdapterShares:
    """Predicted seconds of computation by adapter and by rank, halved every 30 s. Times are seconds of any clock.

    Only ratios count, so new seconds grow instead of the old ones shrinking (forward decay; Cormode et al., 2009).
    """

    def __init__(self) -> None:
        self._origin: float | None = None
        self._total = 0.0
        self._weights: dict[int, tuple[float, int]] = {}
        """Weight and rank by adapter."""
        self._ranks: dict[int, float] = {}
        self._hottest = Hottest(0, self._weights)
        self._settled: tuple[Takers, Typical] | None = None
        """For what the homes were last moved, unless an item was counted since."""
        self._homes: dict[int, tuple[str, ...]] = {}
        self._stretches: Mapping[int, Stretch] = {}
        self._apart = False

    def add(self, need: AdapterNeed | None, seconds: float, now: float) -> None:
        """Counts an item, without an adapter too: its load is part of the whole."""
        weight = seconds * self._unit(now)
        self._total += weight
        self._settled = None
        if need:
            number, rank = need.adapter.id, need.rank
            before, _ = self._weights.get(number, (0.0, 0))
            self._weights[number] = before + weight, rank
            self._hottest.rose(number)
            if rank:
                self._ranks[rank] = self._ranks.get(rank, 0.0) + weight

    def share(self, adapter: int) -> float:
        """An adapter's share of the recent load."""
        weight, _ = self._weights.get(adapter, (0.0, 0))
        return weight / self._total if self._total else 0.0

    def outlook(self, need: AdapterNeed, typical: Typical) -> AdapterOutlook:
        """The experience with an adapter."""
        return AdapterOutlook(
            self._homes.get(need.adapter.id, ()),
            self._stretches.get(need.rank, EVERYWHERE),
            typical.delivery_seconds,
            typical.copy_seconds,
            typical.rank_step_seconds,
        )

    def settle(self, takers: Takers, typical: Typical) -> None:
        """Moves homes that no longer fit the load."""
        if not takers or self._settled == (takers, typical):
            return
        self._settled = takers, typical
        if len(takers) == 1:
            # Every order has this worker alone.
            self._homes = {}
            return
        self._settle_stretches(len(takers), typical)
        most = min(MOST_HOMED, sum(slots for _, slots in takers))
        if most != self._hottest.most:
            self._hottest = Hottest(most, self._weights)
        loads = (self._load(each, len(takers)) for each in self._hottest.in_order())
        self._homes = homes_of(loads, takers, self._homes)

    def _load(self, adapter: int, workers: int) -> AdapterLoad:
        share, before = self.share(adapter), len(self._homes.get(adapter, ())) or 1
        _, rank = self._weights[adapter]
        stretch = self._stretches.get(rank, EVERYWHERE)
        return AdapterLoad(adapter, share, replicas_of(share, workers, before), stretch)

    def _settle_stretches(self, workers: int, typical: Typical) -> None:
        """Moves the stretches if ranks are worth keeping apart and their loads have shifted by half a worker."""
        spread = max(self._ranks, default=0) - min(self._ranks, default=0)
        worth = typical.rank_step_seconds * spread / typical.mean_step_seconds
        self._apart = worth >= (WORTH_END if self._apart else WORTH_BEGIN)
        wanted = stretches_of(self._ranks) if self._apart else {}
        if shifted(self._stretches, wanted, 0.5 / workers):
            self._stretches = wanted

    def _unit(self, now: float) -> float:
        """Weight of a second of computation at a time."""
        if self._origin is None:
            self._origin = now
        unit: float = 2.0 ** min((now - self._origin) / HALF_LIFE_SECONDS, MOST_HALVINGS)
        if unit > LARGEST_UNIT:
            self._rescale(unit)
            self._origin = now
            return 1.0
        return unit

    def _rescale(self, unit: float) -> None:
        least = LEAST_SHARE * self._total
        self._weights = {
            key: (w / unit, rank) for key, (w, rank) in self._weights.items() if w >= least
        }
        self._ranks = {key: w / unit for key, w in self._ranks.items() if w >= least}
        self._total /= unit
        self._hottest = Hottest(self._hottest.most, self._weights)


def replicas_of(share: float, workers: int, before: int) -> int:
    """Replicas of an adapter: as many as its share of the workers, growing at once and shrinking with slack."""
    demand = share * workers
    least = min(max(1, ceil(demand)), max(1, workers))
    return max(least, min(before, ceil(demand + SLACK), workers))


def stretches_of(ranks: Mapping[int, float]) -> dict[int, Stretch]:
    """The ranks in order along the line of workers, each with a part in proportion to its load."""
    total = sum(ranks.values())
    ends = [0.0, *accumulate(ranks[rank] / total for rank in sorted(ranks))]
    return {rank: (ends[n], ends[n + 1]) for n, rank in enumerate(sorted(ranks))}


def shifted(before: Mapping[int, Stretch], after: Mapping[int, Stretch], most: float) -> bool:
    """Whether any end moved by more than `most`, or other ranks have stretches."""
    if before.keys() != after.keys():
        return True
    return any(
        abs(old - new) > most
        for rank, ends in before.items()
        for old, new in zip(ends, after[rank], strict=True)
    )
