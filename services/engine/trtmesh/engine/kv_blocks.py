"""Counts, names and reports KV blocks, the same way for every backend."""

from __future__ import annotations

from collections.abc import Sequence

from trtmesh.chassis.block_hashes import chain
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksRemoved, BlocksStored, KvEvent


def blocks_needed(tokens: int, tokens_per_block: int) -> int:
    """Blocks of a sequence with this many tokens at its end; the last token's KV is never computed."""
    return -(-(tokens - 1) // tokens_per_block)


def extend_names(
    hashes: list[int], root: int, tokens: Sequence[int], tokens_per_block: int, count: int
) -> list[int]:
    """Extends the names of a sequence's leading full blocks to at least `count`; `root` is the parent of the first."""
    known = len(hashes)
    if known < count:
        parent = hashes[-1] if hashes else root
        following = tokens[known * tokens_per_block : count * tokens_per_block]
        hashes += chain(parent, following, tokens_per_block)
    return hashes


class KvEventLog:
    """Collects changes of the reusable blocks; a chain of stored blocks makes one event."""

    def __init__(self) -> None:
        self._events: list[KvEvent] = []

    def __bool__(self) -> bool:
        return bool(self._events)

    def stored(
        self,
        parent_hash: int,
        block_hash: int,
        token_ids: Sequence[int],
        adapter: Adapter | None = None,
    ) -> None:
        """A block became reusable."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlocksStored)
            and last.block_hashes[-1] == parent_hash
            and last.adapter == adapter
        ):
            last.block_hashes.append(block_hash)
            last.token_ids += token_ids
        else:
            self._events.append(BlocksStored(parent_hash, [block_hash], list(token_ids), adapter))

    def removed(self, block_hashes: Sequence[int]) -> None:
        """Blocks were evicted."""
        if not block_hashes:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved):
            last.block_hashes += block_hashes
        else:
            self._events.append(BlocksRemoved(list(block_hashes)))

    def take(self) -> list[KvEvent]:
        """Returns the changes since the last call."""
        events, self._events = self._events, []
        return events
