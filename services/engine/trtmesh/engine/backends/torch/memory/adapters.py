"""The adapters in a worker's host memory, read and converted on a thread of their own, and their way to the device."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from trtmesh.chassis import vocabulary
from trtmesh.chassis.adapter_content import AdapterContent, is_number, number_of
from trtmesh.chassis.errors import BackendFailed, InvalidField, TrtmeshError
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.adapter_store import AdapterStore, StoredAdapter, StoreLimits, content_of
from trtmesh.engine.adapters.arrays import parse_arrays
from trtmesh.engine.adapters.lora import Lora, Place, Target, Update, converted, fit
from trtmesh.engine.adapters.peft import parse_peft
from trtmesh.engine.backend import AdapterLoad, HeldAdapter
from trtmesh.engine.scheduling.adapter_slots import AdapterSlots
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

MOST_NUMBER = 2**64 - 1

Updates = Mapping[Place, Update]


@dataclass(eq=False, slots=True, kw_only=True)
class LoadedAdapter(StoredAdapter):
    """An adapter in the layers' form. Sequences keep the version of their beginning."""

    updates: Updates
    give_back: Callable[[LoadedAdapter], None]
    """Takes back the hold of a sequence."""
    slot: int = -1
    """The slot, or -1."""


@dataclass(frozen=True, slots=True)
class AdapterTargets:
    """The requirements for an adapter: layers of the model, their type, and limits."""

    layers: Mapping[Place, Target]
    dtype: torch.dtype
    max_rank: int
    max_bytes: int
    """Most bytes of a content."""


Slots = AdapterSlots[LoadedAdapter, Any]


class EngineThread(Protocol):
    """The engine's thread as seen by the cache; both methods return at once."""

    def run(self, act: Callable[[Slots], object]) -> None:
        """Calls `act` with the slots, then delivers the news."""

    def lost(self, adapter: LoadedAdapter, error: TrtmeshError) -> None:
        """Ends the sequences waiting for an adapter."""


class AdapterCache:
    """Adapters by number and version. Implements AdapterDevice.

    The event loop looks up, the loading thread loads, and the engine's thread moves adapters to the device; a lock
    guards the bookkeeping, never a conversion.
    """

    def __init__(
        self,
        targets: AdapterTargets,
        limits: StoreLimits,
        copy: Callable[[int, Updates], None] | None,
    ) -> None:
        """`copy` fills a slot of the device; None without slots."""
        self.load_seconds = 0.0
        self._targets = targets
        self._copy = copy
        self._lock = threading.Lock()
        self.store = AdapterStore[LoadedAdapter](limits)
        """Read from any thread, and changed under the lock."""
        self._broken: list[HeldAdapter] = []
        # One core each: the others compute the steps.
        alone = partial(torch.set_num_threads, 1)
        self._loader = ThreadPoolExecutor(1, "adapter-loads", alone)
        # Separate: a sequence need not wait for loads of other adapters.
        self._copier = ThreadPoolExecutor(1, "adapter-copies", alone)

    def connect(self, engine: EngineThread) -> None:
        self._engine = engine

    @property
    def states(self) -> list[HeldAdapter]:
        """The adapters in memory, the longest unused first, and unusable adapters of the prefetch directory."""
        with self._lock:
            return [*self.store.states, *self._broken]

    def hold(self, asked: vocabulary.Lora, holders: int) -> LoadedAdapter:
        """The adapter for `holders` sequences. Each gives a hold back. Raises InvalidField, AdapterNotFound or
        AdaptersFull."""
        with self._lock:
            return self.store.hold(asked, holders)

    def load(self, load: AdapterLoad) -> None:
        """Loads an adapter on the loading thread."""
        self._loader.submit(self._load, load)

    def unload(self, number: int, version: str, *, unpin: bool) -> None:
        """Unloads or unpins a version, or all with ''."""
        with self._lock:
            removed = self.store.unload(number, version, unpin=unpin)
        self._dropped(removed)

    def prefetch(self, directories: Iterable[Path]) -> None:
        """Loads an adapter from each directory. The directory's name is the adapter's number or name. An unusable
        adapter is reported and left out."""
        for each in directories:
            try:
                self._put(self._prefetched(each))
            except TrtmeshError as error:
                log.warning("the adapter in %s cannot be loaded: %s", each, error.message)
                self._report_broken(each.name, error)
            except Exception as error:
                # Broad on purpose: the worker serves the other adapters.
                log.exception("the adapter in %s cannot be loaded", each)
                self._report_broken(each.name, _defect(error))

    def take_news(self) -> list[HeldAdapter]:
        """The states changed since the last call."""
        with self._lock:
            return self.store.take_news()

    def bring(self, adapter: LoadedAdapter, slot: int) -> bool:
        assert self._copy
        adapter.slot = slot
        self._copier.submit(self._bring, adapter, partial(self._copy, slot, adapter.updates))
        return False

    def note(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            self.store.note(adapter)

    def close(self) -> None:
        """Waits for the current load and copy, and drops the others."""
        self._loader.shutdown(cancel_futures=True)
        self._copier.shutdown(cancel_futures=True)

    def _bring(self, adapter: LoadedAdapter, copy: Callable[[], None]) -> None:
        try:
            copy()
        except Exception as error:
            log.exception("adapter %d could not be copied to the device", adapter.identity.id)
            reason = f"the adapter could not be copied to the device: {error}"
            self._engine.lost(adapter, BackendFailed(reason))
            return
        self._engine.run(lambda slots: slots.arrived(adapter))

    def _prefetched(self, directory: Path) -> AdapterLoad:
        name = directory.name
        if is_number(name) and int(name) > MOST_NUMBER:
            limit = f"at most {MOST_NUMBER}, or a name"
            raise InvalidField.of("the name of an adapter's directory", int(name), limit)
        content = AdapterContent.read(directory, self._targets.max_bytes)
        return AdapterLoad(Adapter(_number_of(name), name, content.version), content)

    def _report_broken(self, name: str, error: TrtmeshError) -> None:
        identity = Adapter(_number_of(name), name)
        self._broken.append(HeldAdapter(identity, epb.ADAPTER_PLACE_ABSENT, error=error))

    def _load(self, load: AdapterLoad) -> None:
        start = time.perf_counter()
        try:
            self._put(load)
        except TrtmeshError as error:
            self._fail(load.identity, error)
        except Exception as error:
            log.exception("adapter %d could not be loaded", load.identity.id)
            self._fail(load.identity, _defect(error))
        self.load_seconds += time.perf_counter() - start

    def _put(self, load: AdapterLoad) -> None:
        with self._lock:
            adapter = self.store.get(load.identity.id, load.identity.version)
            if adapter is not None:
                self.store.retain(adapter, pinned=load.pinned)
        if adapter is None:
            adapter = self._read(load)
            with self._lock:
                removed = self.store.put(adapter)
            self._dropped(removed)
        loaded = adapter
        self._engine.run(lambda slots: slots.offer(loaded))

    def _fail(self, identity: Adapter, error: TrtmeshError) -> None:
        with self._lock:
            self.store.failed(identity, error)
        self._dropped([])

    def _read(self, load: AdapterLoad) -> LoadedAdapter:
        lora, most = read_content(content_of(load), self._targets.layers), self._targets.max_rank
        if lora.rank > most:
            raise InvalidField.of("adapter rank", lora.rank, f"at most {most}", "adapters.max_rank")
        # An infinite value would spoil other rows: 0 times infinity is NaN.
        lora = converted(lora, self._targets.dtype)
        return LoadedAdapter(
            identity=load.identity,
            rank=lora.rank,
            size_bytes=lora.size_bytes,
            pinned=load.pinned,
            updates=lora.updates,
            give_back=self._give_back,
        )

    def _give_back(self, adapter: LoadedAdapter) -> None:
        with self._lock:
            removed = self.store.release(adapter)
        if removed:
            self._dropped(removed)

    def _dropped(self, removed: Sequence[LoadedAdapter]) -> None:
        """Takes adapters off the device; also wakes the engine's thread, to deliver the news."""

        def drop(slots: Slots) -> None:
            for each in removed:
                slots.drop(each)

        self._engine.run(drop)


def _number_of(name: str) -> int:
    """The number of a prefetched adapter: the name of the directory, if a number, as for Triton."""
    is_own = is_number(name) and int(name) <= MOST_NUMBER
    return int(name) if is_own else number_of(name)


def _defect(error: Exception) -> BackendFailed:
    return BackendFailed(f"the adapter could not be loaded: {type(error).__name__}: {error}")


def read_content(content: AdapterContent, targets: Mapping[Place, Target]) -> Lora:
    """The updates of the model's linear layers. Raises InvalidRequest or UnsupportedField with file or layer."""
    if content.format == pb.ADAPTER_FORMAT_PEFT:
        return fit(parse_peft(content), targets)
    return fit(parse_arrays(content, targets), targets)
