"""The use of each version of an adapter by this router."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.adapters.registry import VersionKey

MOST_UNUSED = 4096
"""Most versions without a live item; the longest known are forgotten."""


@dataclass(slots=True)
class Usage:
    """Counters of a version."""

    live: int = 0
    items: int = 0
    hits: int = 0
    """Items whose worker had the version at the first dispatch."""
    loads: int = 0
    evictions: int = 0
    served: bool = False
    """Whether a worker took an item with it."""
    rank: int = 0
    """Largest rank of the updates, as workers report it; 0 for unknown."""
    error: TrtmeshError | None = None
    """Why the last worker or this router could not load it."""


class Usages:
    """Counters by version."""

    def __init__(self) -> None:
        self._usages: dict[VersionKey, Usage] = {}

    def of(self, adapter: Adapter) -> Usage:
        """The counters of a version, to be changed."""
        return self.of_key((adapter.id, adapter.version))

    def of_key(self, key: VersionKey) -> Usage:
        if (usage := self._usages.get(key)) is None:
            if len(self._usages) >= MOST_UNUSED:
                self._forget_unused()
            usage = self._usages[key] = Usage()
        return usage

    def live(self, key: VersionKey) -> int:
        return usage.live if (usage := self._usages.get(key)) else 0

    def forget(self, keys: Collection[VersionKey]) -> None:
        """Drops the counters of versions without a live item."""
        for key in keys:
            if not self.live(key):
                self._usages.pop(key, None)

    def _forget_unused(self) -> None:
        unused = [key for key, usage in self._usages.items() if not usage.live]
        self.forget(unused[: MOST_UNUSED // 4])
