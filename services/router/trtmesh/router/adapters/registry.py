"""The registry: adapters with their versions, as a value. Every change makes a new registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PlainSerializer
from trtmesh.chassis.adapter_content import AdapterContent, is_number, number_of, rank_of
from trtmesh.chassis.errors import AlreadyExists, InvalidField, InvalidRequest, NotFound
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.values.persistent_map import K, PersistentMap
from trtmesh.v1 import generation_pb2 as pb

MAX_NAME_LENGTH = 256

FORMATS = {"peft": pb.ADAPTER_FORMAT_PEFT, "arrays": pb.ADAPTER_FORMAT_ARRAYS}
WORDS = {number: word for word, number in FORMATS.items()}
IN_FILE = ConfigDict(extra="forbid")
"""Of values that the registry's file has as they are. The notes beside their types are its rules."""

Key = tuple[str, int]
"""Model and number of an adapter."""

VersionKey = tuple[int, str]
"""Number and version of an adapter, as workers know them."""


def _read_format(word: object) -> int:
    if word not in [*FORMATS]:
        raise ValueError(f"must be {' or '.join(FORMATS)}")
    return FORMATS[str(word)]


def _read_name(name: str) -> str:
    if is_number(name):
        raise ValueError(f"{name!r} is a number, not a name")
    return name


@dataclass(frozen=True, slots=True)
class Version:
    """A version of an adapter; `digest` names its content everywhere."""

    __pydantic_config__ = IN_FILE

    digest: Annotated[str, Field(alias="version", pattern=r"^[0-9a-f]{32}$")]
    format: Annotated[int, BeforeValidator(_read_format), PlainSerializer(WORDS.__getitem__)]
    size_bytes: Annotated[int, Field(ge=0)]
    source: str = ""
    """Directory below a configured root; '' for an uploaded version."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of new requests for a canary; 0 for the current version, which gets the rest."""
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Largest rank in the configuration; 0 for unknown."""

    @classmethod
    def of(cls, digest: str, content: AdapterContent, source: str = "") -> Version:
        try:
            rank = rank_of(content)
        except InvalidRequest:
            # The worker's error says more.
            rank = 0
        return cls(digest, content.format, content.size_bytes, source, rank=rank)


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered adapter."""

    __pydantic_config__ = IN_FILE

    id: Annotated[int, Field(ge=0, lt=2**64)]
    name: Annotated[str, AfterValidator(_read_name)]
    model: Annotated[str, Field(default="")]
    """'' means the only model of the fleet."""
    versions: Annotated[tuple[Version, ...], Field(min_length=1)]
    """The current version, then canaries."""
    pinned: bool = False
    brought: bool = False
    """Whether a request brought it; such adapters may be forgotten."""

    @property
    def key(self) -> Key:
        return self.model, self.id

    @property
    def current(self) -> Version:
        return self.versions[0]

    def share_of(self, version: Version) -> float:
        """The share of new requests from 0 to 1."""
        if version is not self.current:
            return version.share
        return 1.0 - sum(canary.share for canary in self.versions[1:])

    def pick(self, request_id: str) -> Version:
        """The version for a request: the same for all of its items, and on every router."""
        if len(self.versions) == 1:
            return self.current
        digest = blake2b(f"{self.id}:{request_id}".encode(), digest_size=8).digest()
        draw = int.from_bytes(digest, "little") / 2**64
        for canary in self.versions[1:]:
            draw -= canary.share
            if draw < 0:
                return canary
        return self.current

    def version(self, digest: str) -> Version | None:
        return next((each for each in self.versions if each.digest == digest), None)

    def identity(self, version: Version) -> Adapter:
        return Adapter(self.id, self.name, version.digest)


Groups = PersistentMap[K, tuple[Entry, ...]]


@dataclass(frozen=True, slots=True)
class _Index:
    """Adapters by what they are looked up with."""

    names: Groups[str]
    numbers: Groups[int]
    digests: Groups[str]
    pinned: dict[Key, Entry]

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> _Index:
        nothing = PersistentMap[Any, tuple[Entry, ...]]({})
        return cls(nothing, nothing, nothing, {}).changed([], [*entries])

    def changed(self, gone: Sequence[Entry], added: Sequence[Entry]) -> _Index:
        """The index without some adapters, and with others."""
        pinned = self.pinned
        if any(entry.pinned for entry in (*gone, *added)):
            out = {entry.key for entry in gone}
            pinned = {key: entry for key, entry in pinned.items() if key not in out}
            pinned |= {entry.key: entry for entry in added if entry.pinned}
        return _Index(
            _regrouped(self.names, _names_of, gone, added),
            _regrouped(self.numbers, _numbers_of, gone, added),
            _regrouped(self.digests, _digests_of, gone, added),
            pinned,
        )


def _names_of(entry: Entry) -> Iterable[str]:
    return (entry.name,) if entry.name else ()


def _numbers_of(entry: Entry) -> Iterable[int]:
    return (entry.id,)


def _digests_of(entry: Entry) -> Iterable[str]:
    return (version.digest for version in entry.versions)


def _regrouped(
    groups: Groups[K],
    keys_of: Callable[[Entry], Iterable[K]],
    gone: Iterable[Entry],
    added: Iterable[Entry],
) -> Groups[K]:
    """Returns the groups after a change, each in the order of arrival."""
    changed: dict[K, dict[Key, Entry]] = {}

    def group(key: K) -> dict[Key, Entry]:
        if key not in changed:
            changed[key] = {entry.key: entry for entry in groups.get(key, ())}
        return changed[key]

    for entry in gone:
        for key in keys_of(entry):
            group(key).pop(entry.key, None)
    for entry in added:
        for key in keys_of(entry):
            group(key)[entry.key] = entry
    empty = [key for key, each in changed.items() if not each]
    return groups.changed(empty, {key: tuple(e.values()) for key, e in changed.items() if e})


@dataclass(frozen=True)
class Registry:
    """All registered adapters by model and number. `revision` counts the changes."""

    entries: Mapping[Key, Entry]
    revision: int = 0

    @cached_property
    def _by_key(self) -> PersistentMap[Key, Entry]:
        entries = self.entries
        return entries if isinstance(entries, PersistentMap) else PersistentMap(entries)

    @cached_property
    def _index(self) -> _Index:
        return _Index.of(self.entries.values())

    def changed(self, gone: Iterable[Key], added: Entry | None = None) -> Registry:
        """Returns the next registry, which shares all but the changed adapters with this registry."""
        gone, after = [*gone], {} if added is None else {added.key: added}
        former = [e for key in {*gone, *after} if (e := self._by_key.get(key)) is not None]
        registry = Registry(self._by_key.changed(gone, after), self.revision + 1)
        registry.__dict__["_index"] = self._index.changed(former, [*after.values()])
        return registry

    @property
    def pinned(self) -> Iterable[Entry]:
        return self._index.pinned.values()

    def by_id(self, model: str, number: int) -> Entry | None:
        return self.entries.get((model, number)) or self.entries.get(("", number))

    def by_name(self, model: str, name: str) -> Entry | None:
        """Returns an operators' adapter, or else the latest brought adapter."""
        named = self.of_name(name)
        found = [entry for entry in named if not entry.model]
        if model:
            found += (entry for entry in named if entry.model == model)
        return min(reversed(found), key=lambda entry: entry.brought, default=None)

    def of_name(self, name: str) -> Sequence[Entry]:
        """The adapters of a name, of any model."""
        return self._index.names.get(name, ())

    def of_number(self, number: int) -> Sequence[Entry]:
        """The adapters of a number, of any model."""
        return self._index.numbers.get(number, ())

    def of_digest(self, digest: str) -> Sequence[Entry]:
        """The adapters with a version."""
        return self._index.digests.get(digest, ())

    def unsorted(self) -> Iterator[Entry]:
        """All adapters, in no order."""
        return self._by_key.unsorted()

    def versions(self) -> Iterator[tuple[Entry, Version]]:
        for entry in self.entries.values():
            for version in entry.versions:
                yield entry, version

    def difference(self, later: Registry) -> list[Key]:
        """The adapters that differ in a later registry."""
        # Built here, so that a thread can do it.
        _ = later._index
        return [*self._by_key.difference(later._by_key)]


EMPTY = Registry({})


@dataclass(frozen=True, slots=True)
class Registration:
    """What an operator asks to register."""

    name: str
    id: int = 0
    """0 derives the number from the name."""
    model: str = ""
    canary_share: float | None = None
    """None makes the version current."""
    pinned: bool = False
    version: str = ""
    """The expected digest; '' accepts any."""

    def check(self) -> None:
        """Raises InvalidField."""
        if not 1 <= len(self.name) <= MAX_NAME_LENGTH or not self.name.isprintable():
            limit = f"printable and have 1 to {MAX_NAME_LENGTH} characters"
            raise InvalidField.of("name", self.name, limit)
        check_name("name", self.name)
        if self.canary_share is not None and not 0 < self.canary_share <= 1:
            raise InvalidField.of("canary_share", self.canary_share, "above 0 and at most 1")

    @property
    def number(self) -> int:
        return self.id or number_of(self.name)


def check_name(field: str, name: str) -> None:
    """Raises InvalidField for a name that reads as a number."""
    if is_number(name):
        limit = "more than digits, which name an adapter by its number"
        raise InvalidField.of(field, name, limit)


def add(registry: Registry, asked: Registration, version: Version) -> Registry:
    """Registers a version as the current version, or as a canary. Raises InvalidField or AlreadyExists."""
    known = _registered(registry, asked)
    if asked.canary_share is None:
        versions = (replace(version, share=0.0), *_others(known, version.digest))
    elif known is None:
        raise InvalidField(
            f"is {asked.canary_share}, but {asked.name!r} has no current version yet; add it without a share",
            field="canary_share",
        )
    else:
        versions = _with_canary(known, replace(version, share=asked.canary_share))
    entry = Entry(
        known.id if known else asked.number,
        asked.name,
        asked.model,
        versions,
        asked.pinned or (known is not None and known.pinned),
    )
    return _with(registry, entry, without=registry.of_number(entry.id))


def _registered(registry: Registry, asked: Registration) -> Entry | None:
    """The operators' adapter that `asked` names. Raises InvalidField or AlreadyExists if number and name disagree."""
    for entry in (*registry.of_name(asked.name), *registry.of_number(asked.number)):
        if entry.brought:
            continue
        if entry.name != asked.name:
            raise AlreadyExists(
                f"{asked.number} is the number of adapter {entry.name!r}; choose another",
                field="id",
                value=str(asked.number),
            )
        if asked.id not in (0, entry.id):
            raise InvalidField.of("id", asked.id, f"{entry.id}, the number of {entry.name!r}")
        if asked.model != entry.model:
            raise InvalidField.of("model", asked.model, f"{entry.model!r}, that of {entry.name!r}")
        return entry
    return None


def _others(known: Entry | None, digest: str) -> Iterator[Version]:
    """The canaries beside a new current version."""
    if known is not None:
        yield from (each for each in known.versions[1:] if each.digest != digest)


def _with_canary(known: Entry, canary: Version) -> tuple[Version, ...]:
    if canary.digest == known.current.digest:
        raise InvalidField(
            "is set for the current version; a canary needs other content", field="canary_share"
        )
    others = [*_others(known, canary.digest)]
    free = 1.0 - sum(each.share for each in others)
    if canary.share > free:
        raise InvalidField.of(
            "canary_share", canary.share, f"at most {free:g} beside the other canaries"
        )
    return (known.current, *others, canary)


def bring(registry: Registry, entry: Entry) -> Registry:
    """Adds an adapter brought by a request, in place of an adapter brought before."""
    return _with(registry, entry, without=[entry])


def check_free(registry: Registry, model: str, number: int) -> None:
    """Raises InvalidField for a number that an operator registered."""
    known = registry.by_id(model, number)
    if known is not None and not known.brought:
        raise InvalidField(
            f"is set for {number}, the number of the registered adapter {known.name!r}; leave the weights out, or"
            " choose another number",
            field="lora.weights",
            value=str(number),
        )


def remove(registry: Registry, number: int, digest: str = "") -> Registry:
    """Forgets an adapter, or a version other than the current version. Raises NotFound or InvalidField."""
    entries = _known(registry, number)
    if not digest:
        return without(registry, entries)
    entry = entries[0]
    if entry.version(digest) is None:
        known = ", ".join(each.digest for each in entry.versions)
        raise NotFound(
            f"is {digest!r}, but the versions of {entry.name!r} are {known}",
            field="version",
            value=digest,
        )
    if digest == entry.current.digest:
        raise InvalidField(
            f"is {digest}, the current version of {entry.name!r}; add another one first, or remove the adapter",
            field="version",
        )
    kept = tuple(each for each in entry.versions if each.digest != digest)
    return _with(registry, replace(entry, versions=kept))


def take_back(registry: Registry, key: Key, digest: str, former: Version | None) -> Registry:
    """Takes back a version after a failed load: a canary, or the current version if there is a `former` version."""
    entry = registry.entries.get(key)
    if entry is None or (version := entry.version(digest)) is None:
        return registry
    kept = tuple(each for each in entry.versions if each is not version)
    if version is entry.current:
        if former is None:
            return registry
        kept = (replace(former, share=0.0), *_others(entry, former.digest))
    return _with(registry, replace(entry, versions=kept))


def pin(registry: Registry, number: int, *, pinned: bool) -> Registry:
    """Keeps an adapter loaded, or no longer; a brought one becomes the operators'. Raises NotFound."""
    entry = _known(registry, number)[0]
    return _with(registry, replace(entry, pinned=pinned, brought=entry.brought and not pinned))


def without(registry: Registry, entries: Iterable[Entry]) -> Registry:
    return registry.changed([entry.key for entry in entries])


def _known(registry: Registry, number: int) -> list[Entry]:
    """The adapters of a number, operators' first. Raises NotFound."""
    found = sorted(registry.of_number(number), key=lambda entry: entry.brought)
    if not found:
        raise NotFound(
            f"is {number}, but no adapter has this number", field="id", value=str(number)
        )
    return found


def _with(registry: Registry, entry: Entry, without: Iterable[Entry] = ()) -> Registry:
    return registry.changed([each.key for each in without], entry)
