"""Adapters of a simulated worker: no weights, but identity, rank, load time, and a place in both tiers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.engine.adapter_store import (
    AdapterStore,
    StoredAdapter,
    StoreLimits,
    checked_rank,
    content_of,
)
from trtmesh.engine.backend import AdapterLoad
from trtmesh.engine.backends.simulated.settings import SimulatedAdapterSettings
from trtmesh.engine.scheduling.adapter_slots import AdapterSlots

ADAPTER_BYTES = 2**20
"""Size of every adapter."""


class SimulatedAdapters:
    """Both tiers, and the loads, one after another. Implements AdapterDevice: a copy takes no time."""

    slots: AdapterSlots[StoredAdapter, Any]
    """The scheduler's."""

    def __init__(self, settings: SimulatedAdapterSettings) -> None:
        self._settings = settings
        limits = StoreLimits(
            settings.host_adapters * ADAPTER_BYTES,
            settings.slots,
            host_setting="adapters.host_adapters",
            slots_setting="adapters.slots",
        )
        self.store = AdapterStore[StoredAdapter](limits)
        self.load_seconds = 0.0
        self._loading: deque[AdapterLoad] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def release(self, adapter: StoredAdapter) -> None:
        """Takes back the hold of a sequence."""
        self._drop(self.store.release(adapter))

    def load(self, load: AdapterLoad, told: Callable[[], None]) -> None:
        """Loads an adapter; `told` is called once there is news."""
        self._loading.append(load)
        if self._timer is None:
            self._begin(told)

    def unload(self, number: int, version: str, *, unpin: bool) -> None:
        self._drop(self.store.unload(number, version, unpin=unpin))

    def close(self) -> None:
        if self._timer:
            self._timer.cancel()

    def bring(self, adapter: StoredAdapter, slot: int) -> bool:
        return True

    def note(self, adapter: StoredAdapter) -> None:
        self.store.note(adapter)

    def _begin(self, told: Callable[[], None]) -> None:
        known = self.store.get(*_key(self._loading[0])) is not None
        seconds = 0.0 if known else self._settings.load_ms / 1000
        self.load_seconds += seconds
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._finish, told)

    def _finish(self, told: Callable[[], None]) -> None:
        self._timer = None
        load = self._loading.popleft()
        try:
            self._put(load)
        except TrtmeshError as error:
            self.store.failed(load.identity, error)
        if self._loading:
            self._begin(told)
        told()

    def _put(self, load: AdapterLoad) -> None:
        adapter = self.store.get(*_key(load))
        if adapter is not None:
            self.store.retain(adapter, pinned=load.pinned)
        else:
            adapter = StoredAdapter(
                identity=load.identity,
                rank=checked_rank(content_of(load), self._settings.max_rank),
                size_bytes=ADAPTER_BYTES,
                pinned=load.pinned,
            )
            self._drop(self.store.put(adapter))
        self.slots.offer(adapter)

    def _drop(self, removed: list[StoredAdapter]) -> None:
        for each in removed:
            self.slots.drop(each)


def _key(load: AdapterLoad) -> tuple[int, str]:
    return load.identity.id, load.identity.version
