"""The adapters in a worker's host memory, the same way for every backend: limits, pins, eviction and news."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from trtmesh.chassis.adapter_content import AdapterContent, rank_of
from trtmesh.chassis.errors import AdapterNotFound, AdaptersFull, InvalidField, TrtmeshError
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.engine.backend import AdapterLoad, HeldAdapter
from trtmesh.v1 import engine_pb2 as epb


@dataclass(eq=False, slots=True, kw_only=True)
class StoredAdapter:
    """An adapter in host memory."""

    identity: Adapter
    rank: int
    size_bytes: int
    place: epb.AdapterPlace.ValueType = epb.ADAPTER_PLACE_HOST
    pinned: bool = False
    holders: int = 0
    """Live sequences with this adapter."""
    unloading: bool = False
    """Whether the adapter leaves with the last holder."""

    @property
    def key(self) -> tuple[int, str]:
        return self.identity.id, self.identity.version

    @property
    def state(self) -> HeldAdapter:
        return HeldAdapter(self.identity, self.place, self.rank, self.size_bytes, self.pinned)


A = TypeVar("A", bound=StoredAdapter)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Sizes of both tiers, with the names of the settings for errors."""

    host_bytes: int
    slots: int
    """Most adapters on the device."""
    host_setting: str = "adapters.host_bytes"
    slots_setting: str = "adapters.max_batch_adapters"


class AdapterStore(Generic[A]):
    """Adapters by number and version. The longest unused leave first, but never with holders or pinned.

    Methods return the adapters dropped from memory; the caller takes these off the device.
    """

    def __init__(self, limits: StoreLimits) -> None:
        self.limits = limits
        self.used_bytes = 0
        self.loads = self.evictions = 0
        self.has_news = False
        self._pins = 0
        self._used = 0
        """Adapters with holders that are not pinned."""
        self._idle_bytes = 0
        """Bytes of those without holders that are not pinned."""
        # The longest unused first.
        self._held: OrderedDict[tuple[int, str], A] = OrderedDict()
        self._news: dict[tuple[int, str], HeldAdapter] = {}
        # Apart: no change may hide an error, and no error a change.
        self._failures: dict[tuple[int, str], HeldAdapter] = {}

    @property
    def states(self) -> list[HeldAdapter]:
        return [each.state for each in self._held.values()]

    def get(self, number: int, version: str) -> A | None:
        return self._held.get((number, version))

    def hold(self, asked: Lora, holders: int) -> A:
        """The adapter for `holders` more sequences. Raises InvalidField, AdapterNotFound, or AdaptersFull where pinned
        adapters take all slots."""
        number, version = _key_of(asked)
        adapter = self._held.get((number, version))
        if adapter is None or adapter.unloading:
            raise AdapterNotFound(
                f"is {number}{f' ({asked.name!r})' if asked.name else ''} in version {version}, an adapter that this"
                " worker does not hold; load it first",
                field="lora.id",
                value=str(number),
            )
        if not adapter.pinned and self._pins >= self.limits.slots:
            raise self._crowded("lora.id", adapter)
        self._held.move_to_end(adapter.key)
        self._count(adapter, -1)
        adapter.holders += holders
        self._count(adapter, 1)
        return adapter

    def release(self, adapter: A) -> list[A]:
        """Takes back a hold."""
        self._count(adapter, -1)
        adapter.holders -= 1
        self._count(adapter, 1)
        return self._leave([adapter])

    def put(self, adapter: A) -> list[A]:
        """Adds an adapter. Raises InvalidField for too large an adapter, AdaptersFull where others in use leave no
        room, or where a pin leaves others no slot."""
        if adapter.pinned:
            self._check_pin(adapter)
        removed = self._make_room(adapter.size_bytes)
        self._held[adapter.key] = adapter
        self._count(adapter, 1)
        self.used_bytes += adapter.size_bytes
        self.loads += 1
        self._failures.pop(adapter.key, None)
        self.note(adapter)
        return removed

    def retain(self, adapter: A, *, pinned: bool) -> None:
        """Keeps a possibly leaving adapter; `pinned` pins the adapter. Raises AdaptersFull where the pinned adapters
        would leave others with sequences no slot."""
        if pinned and not adapter.pinned:
            self._check_pin(adapter)
            self._count(adapter, -1)
            adapter.pinned = True
            self._count(adapter, 1)
        adapter.unloading = False
        self._failures.pop(adapter.key, None)
        self.note(adapter)

    def unload(self, number: int, version: str, *, unpin: bool = False) -> list[A]:
        """Removes a version, or all with '', now or with the last holder; with `unpin`, only unpins it."""
        if version:
            found = [held] if (held := self.get(number, version)) else []
        else:
            found = [each for each in self._held.values() if each.identity.id == number]
        if not found and not unpin:
            absent = Adapter(number, version=version)
            self._news[number, version] = HeldAdapter(absent, epb.ADAPTER_PLACE_ABSENT)
            self.has_news = True
        for each in found:
            each.unloading = each.unloading or not unpin
            self._count(each, -1)
            each.pinned = False
            self._count(each, 1)
            self.note(each)
        return self._leave(found)

    def note(self, adapter: A) -> None:
        """Reports the state of an adapter in memory as news."""
        if self._held.get(adapter.key) is adapter:
            self._news[adapter.key] = adapter.state
            self.has_news = True

    def failed(self, identity: Adapter, error: TrtmeshError) -> None:
        """Reports a failed load or pin as news, with the place of the adapter."""
        key = identity.id, identity.version
        held = self._held.get(key)
        state = held.state if held else HeldAdapter(identity, epb.ADAPTER_PLACE_ABSENT)
        self._failures[key] = replace(state, error=error)
        self.has_news = True

    def take_news(self) -> list[HeldAdapter]:
        """The failures and changed states since the last call. A failure comes first: a router takes the first state as
        the answer to the load."""
        news = [*self._failures.values(), *self._news.values()]
        self._failures, self._news, self.has_news = {}, {}, False
        return news

    def _check_pin(self, adapter: A) -> None:
        """Sequences with other adapters need a slot without a pin."""
        others = self._used - (adapter.holders > 0)
        if self._pins + 1 + (others > 0) > self.limits.slots:
            raise self._crowded("adapter.id", adapter)

    def _make_room(self, size: int) -> list[A]:
        most, setting = self.limits.host_bytes, self.limits.host_setting
        if size > most:
            raise InvalidField.of("adapter.weights", f"{size} bytes", f"at most {most}", setting)
        kept = self.used_bytes - self._idle_bytes
        if kept + size > most:
            raise AdaptersFull(
                f"pinned adapters and those of running items take {kept} of {most} bytes ({setting}); try again later"
                " or elsewhere",
                value=str(size),
                limit=f"at most {most} bytes",
                limit_field=setting,
            )
        removed: list[A] = []
        missing = self.used_bytes + size - most
        for each in self._held.values():
            if missing <= 0:
                break
            if not each.holders and not each.pinned:
                missing -= each.size_bytes
                removed.append(each)
        for each in removed:
            self._remove(each)
            self.evictions += 1
        return removed

    def _leave(self, adapters: Iterable[A]) -> list[A]:
        leaving = [each for each in adapters if each.unloading and not each.holders]
        for each in leaving:
            self._remove(each)
        return leaving

    def _remove(self, adapter: A) -> None:
        self._count(adapter, -1)
        del self._held[adapter.key]
        self.used_bytes -= adapter.size_bytes
        self._news[adapter.key] = HeldAdapter(adapter.identity, epb.ADAPTER_PLACE_ABSENT)
        self.has_news = True

    def _count(self, adapter: A, more: int) -> None:
        """Takes an adapter out of the sums before its pin or its holders change, and back in."""
        if self._held.get(adapter.key) is not adapter:
            return
        if adapter.pinned:
            self._pins += more
        elif adapter.holders:
            self._used += more
        else:
            self._idle_bytes += more * adapter.size_bytes

    def _crowded(self, field: str, adapter: A) -> AdaptersFull:
        limits = self.limits
        return AdaptersFull(
            f"is {adapter.identity.id}, but pinned adapters take the {limits.slots} slots ({limits.slots_setting});"
            " unpin one or try elsewhere",
            field=field,
            value=str(adapter.identity.id),
            limit=f"at most {limits.slots} adapters",
            limit_field=limits.slots_setting,
        )


def content_of(load: AdapterLoad) -> AdapterContent:
    """The content of a new adapter. Raises AdapterNotFound for a load without content."""
    if load.content is None:
        raise AdapterNotFound(
            "is not in memory; send its content",
            field="adapter.id",
            value=str(load.identity.id),
        )
    return load.content


def checked_rank(content: AdapterContent, most: int) -> int:
    """The largest rank of a content. Raises InvalidField above `most`, or for rank 0."""
    rank = rank_of(content)
    if not 1 <= rank <= most:
        raise InvalidField.of("adapter rank", rank, f"1 to {most}", "adapters.max_rank")
    return rank


def _key_of(asked: Lora) -> tuple[int, str]:
    """Number and version of an item's adapter. Raises InvalidField where either is missing."""
    if asked.id is None:
        raise InvalidField("is not set; a worker knows adapters by number", field="lora.id")
    if asked.version is None:
        raise InvalidField("is not set; name the version that was loaded", field="lora.version")
    return asked.id, asked.version
