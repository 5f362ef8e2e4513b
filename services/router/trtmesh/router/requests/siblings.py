"""Groups items of a request by common prefix: the leader computes the prefix, the others wait and follow to the worker.

A group is capped. The next item leads a new group, on another worker if possible, so that a large request spreads.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from trtmesh.router.placement.load_guard import Booking

LEAST_SHARED_BLOCKS = 2
"""Shortest common prefix worth a wait, in blocks."""


MAX_TOGETHER = 8
"""Most siblings sent to a worker together."""

WAIT_SECONDS = 1.0
"""Longest wait of a follower for its leader."""


@dataclass(slots=True)
class PrefixGroup:
    members: int = 1
    address: str = ""
    computed: asyncio.Event = field(default_factory=asyncio.Event)


class GroupMember:
    def __init__(self, group: PrefixGroup, avoid: frozenset[str]) -> None:
        self._group = group
        self.leads = group.members == 1
        self.avoid = avoid
        """Addresses of workers with a full group; for a leader."""

    @property
    def prefer(self) -> str:
        """Address of the leader's worker, for a follower, or ''."""
        return "" if self.leads else self._group.address

    async def wait(self) -> None:
        """Waits until the leader has computed the prefix or is over, within the limit."""
        if not self.leads:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    await self._group.computed.wait()

    def dispatched(self, address: str, booking: Booking) -> None:
        """The item was sent to a worker."""
        if self.leads and not self._group.address:
            self._group.address = address
            booking.when_computed.append(self._group.computed.set)

    def close(self) -> None:
        """The item is over: followers stop waiting."""
        if self.leads:
            self._group.computed.set()


class Siblings:
    def __init__(self) -> None:
        self._groups: defaultdict[int, list[PrefixGroup]] = defaultdict(list)

    def find(self, blocks: Sequence[int]) -> GroupMember | None:
        """A member of the group with this prefix, or the head of a new group beyond the cap; None without a group."""
        key = _key(blocks)
        if key is None or not self._groups[key]:
            return None
        last = self._groups[key][-1]
        if last.members >= MAX_TOGETHER:
            return self.lead(blocks)
        last.members += 1
        return GroupMember(last, frozenset())

    def lead(self, blocks: Sequence[int]) -> GroupMember | None:
        """The head of a new group; None for a prompt too short to share."""
        key = _key(blocks)
        if key is None:
            return None
        groups = self._groups[key]
        avoid = frozenset(group.address for group in groups if group.address)
        groups.append(PrefixGroup())
        return GroupMember(groups[-1], avoid)


def _key(blocks: Sequence[int]) -> int | None:
    """Equal for prompts with a common prefix, since a block's hash covers all earlier blocks."""
    return blocks[LEAST_SHARED_BLOCKS - 1] if len(blocks) >= LEAST_SHARED_BLOCKS else None
