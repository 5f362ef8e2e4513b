"""Keeps pinned adapters on every worker of their model, and unloads removed versions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from trtmesh.chassis.errors import AdaptersFull, TrtmeshError
from trtmesh.chassis.tasks import next_tick
from trtmesh.router.adapters.adapters import Adapters, ItemAdapter
from trtmesh.router.adapters.registry import Key, VersionKey
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.fleet.worker import Worker

log = logging.getLogger(__name__)

ROUND_SECONDS = 0.25
"""Interval between two looks at what workers hold."""

AGAIN_SECONDS, MOST_SECONDS = 10.0, 300.0
"""First pause before a worker is asked again for the same, and the longest; each pause doubles."""

Ask = tuple[str, int, VersionKey, str]
"""Address and stream of a worker, a version, and what the worker is asked for: pin, unpin or unload."""


@dataclass(frozen=True, slots=True)
class _Pause:
    """A worker is not asked again for the same."""

    seconds: float
    until: float


def check_pins(fleet: Fleet, adapters: Adapters, key: Key, versions: int) -> None:
    """Raises AdaptersFull if so many versions of an adapter, pinned with the others, exceed the slots of a worker."""
    kept = {entry.key: len(entry.versions) for entry in adapters.pinned} | {key: versions}
    for worker in fleet.workers.values():
        models, slots = ("", worker.description.model), worker.adapters.slots
        count = sum(each for (model, _), each in kept.items() if model in models)
        if key[0] in models and 0 < slots < count:
            raise AdaptersFull(
                f"would make {count} pinned versions of adapters, but worker {worker.name} has {slots} slots for them;"
                " unpin another first (`trtmesh adapters unpin`), or give the workers more slots",
                field="pinned",
                value=str(count),
                limit=f"at most {slots}",
                worker=worker.name,
            )


class Pins:
    """Compares the registry with what workers hold."""

    def __init__(self, fleet: Fleet, adapters: Adapters) -> None:
        self._fleet = fleet
        self._adapters = adapters
        self._pauses: dict[Ask, _Pause] = {}
        self._deliveries: dict[Ask, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Looks at every worker at the interval, until cancelled."""
        try:
            while True:
                self._look()
                await next_tick(ROUND_SECONDS)
        finally:
            for task in self._deliveries.values():
                task.cancel()
            await asyncio.gather(*self._deliveries.values(), return_exceptions=True)

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        self._forget_pauses(now)
        for worker in self._fleet.workers.values():
            if worker.ready and worker.takes_adapters:
                self._unload(worker, now)
                self._pin(worker, now)

    def _unload(self, worker: Worker, now: float) -> None:
        """Unloads removed versions without a live item, and takes pins back."""
        held, removed = worker.adapters.held, self._adapters.removed
        fewer, others = (removed, held) if len(removed) < len(held) else (held, removed)
        for key in [key for key in fewer if key in others]:
            if not self._adapters.usages.live(key) and self._is_new(
                (worker.address, worker.streams, key, "unload"), now
            ):
                worker.unload(key)
        for key in worker.adapters.pinned:
            if (
                key not in removed
                and self._is_unpinned(key)
                and self._is_new((worker.address, worker.streams, key, "unpin"), now)
            ):
                worker.unload(key, unpin=True)

    def _is_unpinned(self, key: VersionKey) -> bool:
        """Whether the registry has a version that is not pinned."""
        known = self._adapters.version_of(*key)
        return known is not None and not known[0].pinned

    def _pin(self, worker: Worker, now: float) -> None:
        for adapter in self._pinned(worker.description.model):
            key = (adapter.identity.id, adapter.identity.version)
            residency = worker.adapters.held.get(key)
            if (residency is None or not residency.pinned) and self._is_new(
                (worker.address, worker.streams, key, "pin"), now
            ):
                if residency is not None:
                    worker.pin(adapter.identity)
                else:
                    self._deliver(worker, adapter)

    def _pinned(self, model: str) -> Iterator[ItemAdapter]:
        """The versions to keep on a model's workers."""
        for entry in self._adapters.pinned:
            if entry.model in ("", model):
                for version in entry.versions:
                    yield ItemAdapter(entry.identity(version), version)

    def _forget_pauses(self, now: float) -> None:
        """Drops pauses of lost streams, and pauses without another question to the worker afterwards."""
        streams = {(worker.address, worker.streams) for worker in self._fleet.workers.values()}
        self._pauses = {
            ask: pause
            for ask, pause in self._pauses.items()
            if ask in self._deliveries
            or (ask[:2] in streams and now < pause.until + 4 * ROUND_SECONDS)
        }

    def _is_new(self, ask: Ask, now: float) -> bool:
        """Whether the worker was not asked for this lately; it is from now on."""
        pause = self._pauses.get(ask)
        if ask in self._deliveries or (pause is not None and now < pause.until):
            return False
        seconds = min(2 * pause.seconds, MOST_SECONDS) if pause is not None else AGAIN_SECONDS
        self._pauses[ask] = _Pause(seconds, now + seconds)
        return True

    def _deliver(self, worker: Worker, adapter: ItemAdapter) -> None:
        key = (adapter.identity.id, adapter.identity.version)
        ask = (worker.address, worker.streams, key, "pin")
        task = asyncio.create_task(self._hold(ask, worker, adapter))
        self._deliveries[ask] = task
        task.add_done_callback(lambda _: self._delivered(ask))

    def _delivered(self, ask: Ask) -> None:
        del self._deliveries[ask]
        # The pause begins with the end of the delivery.
        if (pause := self._pauses.get(ask)) is not None and pause.until != inf:
            until = asyncio.get_running_loop().time() + pause.seconds
            self._pauses[ask] = replace(pause, until=until)

    async def _hold(self, ask: Ask, worker: Worker, adapter: ItemAdapter) -> None:
        name = adapter.identity.name or adapter.identity.id
        try:
            # First, so that a fault of the content is not taken for the worker's refusal.
            content = await self._adapters.content(adapter)
            await self._send(ask, worker, replace(adapter, content=content))
        except TrtmeshError as error:
            log.warning("worker %s does not keep adapter %s: %s", worker.name, name, error.message)

    async def _send(self, ask: Ask, worker: Worker, adapter: ItemAdapter) -> None:
        try:
            await worker.hold(adapter, pinned=True)
        except TrtmeshError as error:
            if not error.row.movable:
                # The same content on the same stream would be refused again.
                self._pauses[ask] = _Pause(AGAIN_SECONDS, inf)
            raise
