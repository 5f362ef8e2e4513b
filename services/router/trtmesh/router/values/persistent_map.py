"""A map as a value: a change makes a new map that shares nearly all memory with the old map."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Self, TypeVar, overload

BUCKETS = 128
"""A change copies one bucket for each changed key: of 10,000 entries about 80."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
D = TypeVar("D")


class PersistentMap(Mapping[K, V]):
    """An immutable map, in the order of insertion."""

    __slots__ = ("_arrivals", "_buckets", "_size")

    def __init__(self, entries: Mapping[K, V]) -> None:
        self._buckets: list[dict[K, tuple[int, V]]] = [{} for _ in range(BUCKETS)]
        """Values with the number of their arrival."""
        self._arrivals = self._size = len(entries)
        for number, (key, value) in enumerate(entries.items()):
            self._buckets[hash(key) % BUCKETS][key] = number, value

    def __getitem__(self, key: K) -> V:
        return self._buckets[hash(key) % BUCKETS][key][1]

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...
    def get(self, key: K, /, default: V | D | None = None) -> V | D | None:
        # Mapping's own costs an exception for each missing key.
        found = self._buckets[hash(key) % BUCKETS].get(key)
        return default if found is None else found[1]

    def __iter__(self) -> Iterator[K]:
        known = chain.from_iterable(bucket.items() for bucket in self._buckets)
        return map(itemgetter(0), sorted(known, key=itemgetter(1)))

    def __len__(self) -> int:
        return self._size

    def unsorted(self) -> Iterator[V]:
        """The values in no order. Unlike the first of `values`, the first of these come at once."""
        return (value for bucket in self._buckets for _, value in bucket.values())

    def changed(self, gone: Iterable[K], added: Mapping[K, V]) -> Self:
        """The map without some keys, then with others."""
        copied: dict[int, dict[K, tuple[int, V]]] = {}

        def bucket(key: K) -> dict[K, tuple[int, V]]:
            number = hash(key) % BUCKETS
            if number not in copied:
                copied[number] = dict(self._buckets[number])
            return copied[number]

        later = type(self).__new__(type(self))
        later._size, later._arrivals = self._size, self._arrivals
        for key in gone:
            later._size -= bucket(key).pop(key, None) is not None
        for key, value in added.items():
            known = bucket(key).get(key)
            later._size += known is None
            later._arrivals += known is None
            bucket(key)[key] = (known[0] if known else later._arrivals), value
        later._buckets = self._buckets.copy()
        for number, changed in copied.items():
            later._buckets[number] = changed
        return later

    def difference(self, later: PersistentMap[K, V]) -> Iterator[K]:
        """Returns the keys with another value in a later map, or in only one of the maps. Shared parts are passed
        over."""
        for before, after in zip(self._buckets, later._buckets, strict=True):
            if before is not after:
                for key in before.keys() | after.keys():
                    known, other = self.get(key), later.get(key)
                    if known is not other and known != other:
                        yield key
