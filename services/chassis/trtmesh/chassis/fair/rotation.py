"""A queue in which owners take turns, however much each of them has in it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Rotation(Generic[T]):
    """Entries by owner: one of each owner in turn, those of one owner in order."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Hashable, deque[T]] = OrderedDict()
        """The owner in front is next."""

    def __bool__(self) -> bool:
        return bool(self._entries)

    def add(self, owner: Hashable, entry: T) -> None:
        entries = self._entries.get(owner)
        if entries is None:
            entries = self._entries[owner] = deque()
        entries.append(entry)

    def take(self) -> tuple[Hashable, T]:
        """The next entry and its owner; there must be one."""
        owner, entries = next(iter(self._entries.items()))
        entry = entries.popleft()
        if entries:
            self._entries.move_to_end(owner)
        else:
            del self._entries[owner]
        return owner, entry
