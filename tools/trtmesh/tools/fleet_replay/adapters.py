"""The adapters of a simulated worker: the store and the slots of every backend, with deliveries and copies in virtual
time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trtmesh.chassis.errors import AdaptersFull
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.engine.adapter_store import AdapterStore, StoredAdapter, StoreLimits
from trtmesh.engine.backend import HeldAdapter
from trtmesh.engine.scheduling.adapter_slots import AdapterSlots
from trtmesh.router.placement import AdapterNeed, Place, Residency
from trtmesh.router.placement.residency import AdapterKey
from trtmesh.tools.fleet_replay.fleet_model import FleetModel
from trtmesh.v1 import engine_pb2 as epb

PLACES = {epb.ADAPTER_PLACE_HOST: Place.HOST, epb.ADAPTER_PLACE_DEVICE: Place.DEVICE}


def changes_of(news: Iterable[HeldAdapter]) -> Mapping[AdapterKey, Residency | None]:
    """Changed states as a worker reports them; None for an adapter that left memory."""
    return {
        (each.adapter.id, each.adapter.version): (
            Residency(each.adapter, place, each.rank) if (place := PLACES.get(each.place)) else None
        )
        for each in news
    }


class ReplayedAdapters:
    """Both tiers. Implements AdapterDevice: a copy to the device takes its time."""

    slots: AdapterSlots[StoredAdapter, Any]
    """The scheduler's."""

    def __init__(
        self,
        model: FleetModel,
        after: Callable[[float, Callable[[], None]], None],
        news: Callable[[], None],
    ) -> None:
        """`after` calls back in some seconds; `news` is called where sequences may start."""
        host = max(model.host_adapters, model.adapter_slots)
        self.store = AdapterStore[StoredAdapter](StoreLimits(host, model.adapter_slots))
        self.copies = 0
        self._model = model
        self._after = after
        self._news = news
        self._waiting: dict[AdapterKey, list[Callable[[], None]]] = {}
        """What is to be called at the arrival of an adapter."""
        self._queue: deque[AdapterNeed] = deque()
        """Deliveries, of which the first is under way, or waits for room in host memory."""
        self._is_full = False

    def hold(self, need: AdapterNeed) -> StoredAdapter | None:
        """The adapter for one more sequence; None if it is not there."""
        adapter = need.adapter
        if self.store.get(*need.key) is None:
            return None
        return self.store.hold(Lora(id=adapter.id, version=adapter.version), 1)

    def fetch(self, need: AdapterNeed, arrived: Callable[[], None] | None = None) -> None:
        """Has an adapter delivered, unless it is there or under way; `arrived` is called then."""
        if need.key not in self._waiting:
            if self.store.get(*need.key) is not None:
                return
            self._waiting[need.key] = []
            self._queue.append(need)
            if len(self._queue) == 1:
                self._after(self._model.delivery_seconds, self._delivered)
        if arrived:
            self._waiting[need.key].append(arrived)

    def release(self, adapter: StoredAdapter) -> None:
        """Takes back the hold of a sequence."""
        self.store.release(adapter)
        if self._is_full and not adapter.holders:
            # Not now: the sequence leaves its slot after this.
            self._is_full = False
            self._after(0.0, self._delivered)

    def bring(self, adapter: StoredAdapter, _slot: int) -> bool:
        self.copies += 1
        self._after(self._model.copy_seconds, lambda: self._copied(adapter))
        return False

    def note(self, adapter: StoredAdapter) -> None:
        self.store.note(adapter)

    def _copied(self, adapter: StoredAdapter) -> None:
        self.slots.arrived(adapter)
        self._news()

    def _delivered(self) -> None:
        """Takes the first adapter in, once those of sequences leave it room."""
        need = self._queue[0]
        adapter = StoredAdapter(identity=need.adapter, rank=need.rank, size_bytes=1)
        try:
            removed = self.store.put(adapter)
        except AdaptersFull:
            self._is_full = True
            return
        self._queue.popleft()
        if self._queue:
            self._after(self._model.delivery_seconds, self._delivered)
        for each in removed:
            self.slots.drop(each)
        for arrived in self._waiting.pop(need.key):
            arrived()
        self.slots.offer(adapter)
        self._news()


def named(name: str, number: int, rank: int) -> AdapterNeed:
    """An adapter of a trace, whose content the simulated router has."""
    return AdapterNeed(Adapter(number, name, "replayed"), rank, deliverable=True)
