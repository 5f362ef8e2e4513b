"""The adapters of this router for workers: finds the version for an item, and changes the registry.

A version is found in the registry of operators, then among the adapters brought by requests. With a directory, brought
adapters are written to the shared registry after the request, and are known here at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice

from trtmesh.chassis.adapter_content import AdapterContent, number_of
from trtmesh.chassis.errors import (
    AdapterBroken,
    AdapterMismatch,
    Exhausted,
    InvalidField,
    Mismatch,
    TrtmeshError,
    Unsupported,
)
from trtmesh.chassis.peft_adapter import check_content
from trtmesh.chassis.tasks import next_tick
from trtmesh.chassis.vocabulary import Adapter, Lora, Tensor
from trtmesh.router.adapters.assembly import check_size
from trtmesh.router.adapters.contents import Contents, FetchContent
from trtmesh.router.adapters.file import RegistryFile, Signature
from trtmesh.router.adapters.registry import (
    EMPTY,
    Entry,
    Key,
    Registration,
    Registry,
    Version,
    VersionKey,
    add,
    bring,
    check_free,
    check_name,
    pin,
    remove,
    take_back,
    without,
)
from trtmesh.router.adapters.settings import AdapterSettings
from trtmesh.router.adapters.usage import Usages
from trtmesh.router.adapters.writing import Brought, Writing
from trtmesh.router.metrics import RouterMetrics

log = logging.getLogger(__name__)

WATCH_SECONDS = 1.0
"""Interval between looks at the registry's file."""

SWEEP_ROUNDS = 60
"""Looks between two sweeps of content files."""

HASHED_AT_ONCE = 2**18
"""Most bytes that are hashed on the event loop."""

MAX_BROUGHT = 10_000
"""Most adapters that requests brought; the longest unused are forgotten."""

MOST_REMOVED = 10_000
"""Most removed versions to be unloaded wherever they are reported."""


BROUGHT = "brought"
"""Metric label of adapters that requests brought."""


@dataclass(frozen=True, slots=True)
class ItemAdapter:
    """The version of an adapter that an item began with, and keeps."""

    identity: Adapter
    version: Version | None = None
    """None for an adapter known from workers alone, which cannot be delivered."""
    content: AdapterContent | None = None
    """Set if found in memory, where the content may be dropped."""
    rank: int = 0
    """Largest rank of the updates; 0 for unknown."""
    brought: bool = False
    """Whether a request brought the adapter. The client then answers for the adapter."""


Trial = Callable[[str, ItemAdapter], Awaitable[None]]
"""Has a worker of a model load a version, if one can load any now. Raises the worker's error."""


async def no_trial(model: str, adapter: ItemAdapter) -> None:
    """The trial of a router without workers."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version gets no requests."""

    version: str
    error: TrtmeshError


class Adapters:
    """Registry and contents of a router."""

    def __init__(
        self, settings: AdapterSettings, metrics: RouterMetrics, fetch: FetchContent | None = None
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._follows = bool(settings.follow)
        self._file = RegistryFile(settings.directory) if settings.directory else None
        self._shares = self._follows or self._file is not None
        """Whether other routers have the registry too."""
        self._signature: Signature | None = None
        self._changing = asyncio.Lock()
        self._slow = False
        self._own = EMPTY
        """Brought here, and not in the shared registry: not yet, or never by a follower."""
        self._writing = Writing(settings.bytes, self._persist)
        self._brought: OrderedDict[Key, None] = OrderedDict()
        """Brought here and not in the shared registry, the longest unused first."""
        self.contents = Contents(settings, fetch)
        self.registry = EMPTY
        self.usages = Usages()
        self._formers: dict[Key, Version] = {}
        """The versions before current versions that have not served yet."""
        self.refusals: dict[Key, Refusal] = {}
        """The latest refused versions of registered adapters."""
        self.removed: dict[VersionKey, None] = {}
        """Versions to be unloaded wherever they are."""
        self.problem = ""
        """Why the registry may be out of date, or ''."""

    def entries(self) -> Iterator[Entry]:
        """All adapters, those only known here included."""
        for entry in self.registry.entries.values():
            if not self._is_replaced(entry):
                yield entry
        yield from self._own.entries.values()

    def _is_replaced(self, entry: Entry) -> bool:
        """Whether newer weights of the number are not in the shared registry yet."""
        return entry.brought and entry.key in self._own.entries

    @property
    def pinned(self) -> Iterable[Entry]:
        """The adapters to keep on workers."""
        return self.registry.pinned

    async def find(self, model: str, asked: Lora, request_id: str) -> ItemAdapter | None:
        """Returns the version for an item: with weights brought by the item, or by number or name. Returns None for an
        unknown version.

        Raises InvalidField.
        """
        if asked.weights is not None and asked.config is not None:
            return await self._bring(model, asked, asked.weights, asked.config)
        if asked.weights is not None or asked.config is not None:
            fields = ("lora.weights", "lora.config")
            raise InvalidField("belong together; send both or none", fields=fields)
        if (entry := self._find(model, asked)) is None:
            return None
        version = entry.version(asked.version) if asked.version else entry.pick(request_id)
        if version is None:
            return None
        content = self.contents.memory.get(version.digest)
        if entry.key in self._brought:
            self._brought.move_to_end(entry.key)
        return self._item_adapter(entry, version, content)

    def names(self, model: str, most: int) -> list[str]:
        """The names of the adapters that operators registered for a model; none of more than `most`."""
        named = (
            entry.name
            for entry in self.registry.unsorted()
            if not entry.brought and entry.model in ("", model)
        )
        found = [*islice(named, most + 1)]
        return sorted(found) if len(found) <= most else []

    def _find(self, model: str, asked: Lora) -> Entry | None:
        if asked.id is None:
            return self._by_name(model, asked.name or "")
        entry = self._by_id(model, asked.id)
        if entry is not None and not entry.brought and asked.name not in (None, entry.name):
            limit = f"{entry.name!r}, the adapter of number {entry.id}"
            raise InvalidField.of("lora.name", asked.name, limit)
        return entry

    def _by_id(self, model: str, number: int) -> Entry | None:
        known = self.registry.by_id(model, number)
        if known is not None and not known.brought:
            return known
        return self._own.entries.get((model, number)) or known

    def _by_name(self, model: str, name: str) -> Entry | None:
        known = self.registry.by_name(model, name)
        if known is not None and not known.brought:
            return known
        return self._own.by_name(model, name) or known

    async def _bring(self, model: str, asked: Lora, weights: Tensor, config: Tensor) -> ItemAdapter:
        check_name("lora.name", asked.name or "")
        if len(weights.data) > HASHED_AT_ONCE:
            content, digest = await asyncio.to_thread(_content_of, weights, config)
        else:
            content, digest = _content_of(weights, config)
        # Clients of TensorRT-LLM v0.8 have no number and send the weights each time.
        number = number_of(asked.name or digest) if asked.id is None else asked.id
        check_free(self.registry, model, number)
        if asked.name and (named := self.registry.by_name(model, asked.name)):
            check_free(self.registry, model, named.id)
        if asked.version not in (None, digest):
            raise InvalidField.of("lora.version", asked.version, f"{digest}, that of the weights")
        version = Version.of(digest, content)
        entry = Entry(number, asked.name or "", model, (version,), brought=True)
        content = self._keep(entry, content)
        return self._item_adapter(entry, version, content)

    def _item_adapter(
        self, entry: Entry, version: Version, content: AdapterContent | None
    ) -> ItemAdapter:
        identity = entry.identity(version)
        # Workers may have split or joined updates.
        rank = self.usages.of(identity).rank or version.rank
        return ItemAdapter(identity, version, content, rank, entry.brought)

    def _keep(self, entry: Entry, content: AdapterContent) -> AdapterContent:
        content = self.contents.memory.put(entry.current.digest, content)
        if self._by_id(entry.model, entry.id) != entry:
            self._brought[entry.key] = None
            if self._shares:
                self._own = bring(self._own, entry)
                self.removed.pop((entry.id, entry.current.digest), None)
            else:
                self.take(bring(self.registry, entry), [entry.key])
        if entry.key in self._brought:
            self._brought.move_to_end(entry.key)
        if self._file is not None and self._own.entries.get(entry.key) == entry:
            written = self._writing.put(entry, content)
            self._tell_slow(slow=not written)
        self._shrink()
        return content

    def _tell_slow(self, *, slow: bool) -> None:
        """Logs the beginning of a time in which brought adapters are not written."""
        if slow and not self._slow:
            log.warning(
                "the directory of adapters is too slow: %d bytes wait to be written (router.adapters.bytes); adapters"
                " that requests bring stay in memory alone until it has caught up",
                self._settings.bytes,
            )
        self._slow = slow

    async def _persist(self, batch: Sequence[Brought]) -> None:
        """Writes brought adapters to the directory; on failure they stay known here."""
        try:
            for entry, content in batch:
                await self.contents.store(entry.current.digest, content)
            # Newer weights under a number may have arrived meanwhile.
            newest = [entry for entry, _ in batch if self._own.entries.get(entry.key) == entry]
            await self._change(lambda registry: reduce(_brought, newest, registry))
        except TrtmeshError as error:
            log.warning("%d adapters stay in memory alone: %s", len(batch), error.message)
            return
        self._forget([e for e in newest if self._own.entries.get(e.key) == e])
        self._shrink()

    def _shrink(self) -> None:
        """Forgets contents beyond the limit of memory, and adapters that are nowhere else or too many."""
        for digest in self.contents.memory.shrink(self._is_held):
            entries = self._here.of_digest(digest)
            self._forget([entry for entry in entries if entry.key in self._brought])
        while len(self._brought) > MAX_BROUGHT:
            self._forget([self._here.entries[next(iter(self._brought))]])

    @property
    def _here(self) -> Registry:
        """The registry, with the adapters brought here and not in a shared registry."""
        return self._own if self._shares else self.registry

    def _forget(self, gone: Sequence[Entry]) -> None:
        """Forgets brought adapters here; the shared registry stays."""
        if not gone:
            return
        for entry in gone:
            self._brought.pop(entry.key, None)
        if self._shares:
            self._own = without(self._own, gone)
        else:
            self.take(without(self.registry, gone), [entry.key for entry in gone])

    def _is_held(self, digest: str) -> bool:
        """Whether a content is in memory alone and must stay."""
        if self._follows:
            return False
        if self.contents.on_disk:
            return self._writing.holds(digest)
        return any(
            not entry.brought and (version := entry.version(digest)) and not version.source
            for entry in self.registry.of_digest(digest)
        )

    def began(self, adapter: ItemAdapter) -> None:
        """An item begins with a version."""
        usage = self.usages.of(adapter.identity)
        usage.live += 1
        usage.items += 1

    def dispatched(self, adapter: ItemAdapter, *, hit: bool) -> None:
        """Counts an item with the first worker; `hit` if the worker had the version."""
        usage = self.usages.of(adapter.identity)
        usage.hits += hit
        usage.served = True
        known = self.registry.of_number(adapter.identity.id)
        name = adapter.identity.name if known and not known[0].brought else BROUGHT
        self._metrics.note_adapter(name, hit=hit)

    def ended(self, adapter: ItemAdapter) -> None:
        """An item with a version is over."""
        self.usages.of(adapter.identity).live -= 1

    async def content(self, adapter: ItemAdapter) -> AdapterContent:
        """The content of an item's version. Raises AdapterMismatch, NotFound or the followed router's error."""
        if adapter.content is not None:
            return adapter.content
        assert adapter.version is not None
        return await self.load(adapter.identity, adapter.version)

    async def load(self, identity: Adapter, version: Version) -> AdapterContent:
        """The content of a version. Raises as `content`."""
        try:
            content = await self.contents.load(identity.id, version)
        except TrtmeshError as error:
            self.usages.of(identity).error = error
            raise
        content = self.contents.memory.put(version.digest, content)
        self._shrink()
        return content

    async def add(self, asked: Registration, source: str, trial: Trial = no_trial) -> Entry:
        """Registers a version from a directory below a root, once a worker has loaded it, unless no worker can now.
        Raises InvalidRequest, NotFound, Mismatch and more."""
        self.check_owner()
        asked.check()
        content, digest = await self.contents.read_source(source)
        return await self._register(asked, content, digest, source, trial)

    async def upload(
        self, asked: Registration, content: AdapterContent, trial: Trial = no_trial
    ) -> Entry:
        """Registers a version and the content. Raises as `add`, or Exhausted without memory for the content."""
        self.check_owner()
        asked.check()
        digest = await asyncio.to_thread(lambda: content.version)
        return await self._register(asked, content, digest, "", trial)

    async def _register(
        self,
        asked: Registration,
        content: AdapterContent,
        digest: str,
        source: str,
        trial: Trial,
    ) -> Entry:
        if asked.version not in ("", digest):
            raise AdapterMismatch(
                f"is {asked.version!r} but the content is {digest}",
                field="version",
                value=asked.version,
                limit=digest,
            )
        version = await asyncio.to_thread(Version.of, digest, content, source)
        entry = add(self.registry, asked, version).by_name(asked.model, asked.name)
        assert entry is not None
        if not source:
            self._check_room(content)
        await self._check(entry, ItemAdapter(entry.identity(version), version, content), trial)
        try:
            if not source:
                await self.contents.store(digest, content)
            await self._change(lambda registry: add(registry, asked, version))
        except TrtmeshError:
            if self.version_of(entry.id, digest) is None:
                # The worker of the trial has it.
                self._unload([(entry.id, digest)])
            raise
        self.contents.memory.put(digest, content)
        self.refusals.pop(entry.key, None)
        self._shrink()
        return self.registry.entries.get(entry.key, entry)

    async def _check(self, entry: Entry, adapter: ItemAdapter, trial: Trial) -> None:
        """Raises the reason why a version must not get requests."""
        assert adapter.content is not None
        try:
            await asyncio.to_thread(check_content, adapter.content)
            await trial(entry.model, adapter)
        except TrtmeshError as error:
            self._refuse(entry.key, adapter.identity, error)
            raise

    def _refuse(self, key: Key, identity: Adapter, error: TrtmeshError) -> None:
        """Shows why a version of a registered adapter gets no requests."""
        if key in self.registry.entries:
            self.refusals[key] = Refusal(identity.version, error)

    async def take_back(self, adapter: ItemAdapter, error: TrtmeshError) -> AdapterBroken:
        """Handles a worker's failure to load an operators' version for an item. A version without a served item gives
        requests back to the former version, a canary to the current version. Returns the error of items that need this
        version."""
        identity = adapter.identity
        name = identity.name or identity.id
        for entry in self.registry.of_number(identity.id):
            former = self._formers.get(entry.key)
            if entry.version(identity.version) is None or self.usages.of(identity).served:
                continue
            if former is None and entry.current.digest == identity.version:
                continue
            log.error(
                "version %s of adapter %s cannot be loaded and is taken back: %s",
                *(identity.version, name, error.message),
            )
            await self._take_back(entry.key, identity, former)
            self._formers.pop(entry.key, None)
            self._refuse(entry.key, identity, error)
        return AdapterBroken(
            f"adapter {name} cannot be loaded in version {identity.version}: {error.message}; its operator must add a"
            " usable version (`trtmesh adapters status` tells more)",
            worker=error.worker,
        )

    async def _take_back(self, key: Key, identity: Adapter, former: Version | None) -> None:
        def change(registry: Registry) -> Registry:
            return take_back(registry, key, identity.version, former)

        if self._follows:
            # Until the followed router changes its registry; it has workers of its own.
            self.take(change(self.registry))
            return
        try:
            await self._change(change)
        except TrtmeshError as failed:
            log.warning("the registry cannot be written: %s", failed.message)
            self.take(change(self.registry))

    async def remove(self, number: int, version: str) -> None:
        """Forgets an adapter, or a canary. Raises NotFound, InvalidField and more."""
        self.check_owner()
        entries = self.registry.of_number(number)
        await self._change(lambda registry: remove(registry, number, version))
        self._unload(key for key in _keys_of(entries) if self.version_of(*key) is None)

    async def pin(self, number: int, *, pinned: bool) -> Entry:
        """Keeps an adapter loaded, or no longer. Raises NotFound and more."""
        self.check_owner()
        await self._change(lambda registry: pin(registry, number, pinned=pinned))
        return min(self.registry.of_number(number), key=lambda entry: entry.brought)

    def version_of(self, number: int, digest: str) -> tuple[Entry, Version] | None:
        """A known version."""
        for entry in (*self._own.of_number(number), *self.registry.of_number(number)):
            current = entry is self._own.entries.get(entry.key) or not self._is_replaced(entry)
            if current and (version := entry.version(digest)):
                return entry, version
        return None

    def tell(self, problem: str) -> None:
        """Notes why the registry may be out of date, or ''."""
        if problem and problem != self.problem:
            log.warning("the registry of adapters stays as it was: %s", problem)
        self.problem = problem

    async def watch(self) -> None:
        """Follows the registry's file, until cancelled."""
        rounds = 0
        while True:
            await next_tick(WATCH_SECONDS)
            await self.refresh()
            rounds += 1
            if rounds % SWEEP_ROUNDS == 0:
                await self._sweep()

    async def refresh(self) -> None:
        """Reads the registry's file if it changed. An invalid or unreadable file keeps the former registry."""
        if self._file is None:
            return
        async with self._changing:
            try:
                signature = await asyncio.to_thread(self._file.signature)
                # A disk that recovers shows the signature from before.
                if signature == self._signature and not self.problem:
                    return
                self._signature = signature
                await self._take_read(await asyncio.to_thread(self._file.read))
            except Mismatch as error:
                self.tell(error.message)
            else:
                self.tell("")

    async def _change(self, changed: Callable[[Registry], Registry]) -> None:
        """Changes the registry, in the file where there is one."""
        async with self._changing:
            if self._file is None:
                self.take(changed(self.registry))
                return
            registry, self._signature = await asyncio.to_thread(self._file.change, changed)
            await self._take_read(registry)
            self.tell("")

    async def _take_read(self, registry: Registry) -> None:
        """Takes the registry of the file, compared off the event loop."""
        self.take(registry, await asyncio.to_thread(self.registry.difference, registry))

    def take(self, registry: Registry, changed: Iterable[Key] | None = None) -> None:
        """Replaces the registry, with `changed` adapters. New requests use the new registry."""
        before, self.registry = self.registry, registry
        for key in before.difference(registry) if changed is None else changed:
            self._on_change(before.entries.get(key), registry.entries.get(key))

    def _on_change(self, before: Entry | None, after: Entry | None) -> None:
        """Has lost versions unloaded, and new ones not."""
        if before is not None:
            self._note_former(before, after)
            lost = [key for key in _keys_of([before]) if self.version_of(*key) is None]
            self.usages.forget(lost)
            # Without a file, workers may serve a brought adapter that is only forgotten here.
            if not before.brought or after is not None or self._file is not None:
                self._unload(lost)
            if (after is None or not after.brought) and before.key not in self._own.entries:
                self._brought.pop(before.key, None)
        if after is not None:
            for key in _keys_of([after]):
                self.removed.pop(key, None)

    def _note_former(self, before: Entry, after: Entry | None) -> None:
        """Remembers the last loadable version, in case the new version cannot be loaded."""
        if after is None or after.brought:
            self._formers.pop(before.key, None)
            self.refusals.pop(before.key, None)
        elif after.current.digest != before.current.digest:
            usage = self.usages.of_key((before.id, before.current.digest))
            if usage.served or usage.loads or before.key not in self._formers:
                self._formers[before.key] = before.current

    def _unload(self, keys: Iterable[VersionKey]) -> None:
        self.removed.update(dict.fromkeys(keys))
        while len(self.removed) > MOST_REMOVED:
            del self.removed[next(iter(self.removed))]

    async def _sweep(self) -> None:
        """Forgets the longest unused brought adapters beyond the directory's limit, and files without a version."""
        brought = [entry for entry in self.registry.entries.values() if entry.brought]
        try:
            gone = await self.contents.longest_unused(
                brought, self._settings.directory_bytes, MAX_BROUGHT
            )
            if gone:
                await self._change(lambda registry: without(registry, gone))
            if not self.problem:
                await self.contents.forget(
                    {version.digest for _, version in self.registry.versions()}
                )
        except (TrtmeshError, OSError) as error:
            log.warning("cannot tidy the directory of adapters: %s", error)

    def check_owner(self) -> None:
        """Raises Unsupported if another router owns the registry."""
        if self._follows:
            raise Unsupported(
                f"this router follows the registry of {self._settings.follow} (router.adapters.follow); change it there"
            )

    def _check_room(self, content: AdapterContent) -> None:
        check_size(content.size_bytes)
        if self.contents.on_disk:
            return
        if content.size_bytes > self._settings.bytes:
            raise InvalidField(
                f"is {content.size_bytes} but must be at most {self._settings.bytes} bytes (router.adapters.bytes); set"
                " router.adapters.directory",
                field="size",
                value=str(content.size_bytes),
                limit=f"at most {self._settings.bytes} bytes",
            )
        if not self.contents.memory.has_room(content.size_bytes, self._is_held):
            raise Exhausted(
                f"the adapter has {content.size_bytes} bytes, but the registered ones leave no room for it in"
                f" {self._settings.bytes} bytes (router.adapters.bytes); set router.adapters.directory",
                limit_field="router.adapters.bytes",
            )

    async def close(self) -> None:
        """Ends the loads, and waits until everything brought is written."""
        await self.contents.close()
        await self._writing.flush()


def _content_of(weights: Tensor, config: Tensor) -> tuple[AdapterContent, str]:
    content = AdapterContent.of_arrays(weights, config)
    return content, content.version


def _brought(registry: Registry, entry: Entry) -> Registry:
    """An operator may have registered the number meanwhile."""
    known = registry.by_id(entry.model, entry.id)
    return bring(registry, entry) if known is None or known.brought else registry


def _keys_of(entries: Iterable[Entry]) -> set[VersionKey]:
    return {(entry.id, version.digest) for entry in entries for version in entry.versions}
