"""Translates the library's changes of cached blocks: its hashes are its own, ours are chained from tokens."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from trtmesh.chassis.block_hashes import ROOT_HASH, chain
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksCleared, KvEvent
from trtmesh.engine.ledger import KvEventLog

MOST_BEGINNINGS = 8192
"""First blocks that are remembered."""

Root = tuple[int, Adapter | None]
"""Parent of a sequence's first block, and the adapter behind it."""
PLAIN: Root = (ROOT_HASH, None)


class LibraryBlocks:
    """Names of the blocks that the library caches.

    Its events tell neither adapter nor salt. The worker's own items do, by their first block: where items with equal
    beginnings have different roots, the blocks are told to nobody, because a router would expect other KV in them.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._size = tokens_per_block
        self._names: dict[tuple[int, int], tuple[int, Adapter | None]] = {}
        """By the rank of the library's process and its hash."""
        self._copies: Counter[int] = Counter()
        self._beginnings: OrderedDict[tuple[int, ...], Root | None] = OrderedDict()
        self._next: dict[int, int] = {}
        """Number of the next event by rank."""
        self._only_plain = True
        self._window = 0

    def expect(self, token_ids: Sequence[int], root: Root) -> None:
        """Notes the beginning of an item."""
        self._only_plain = self._only_plain and root == PLAIN
        beginning = tuple(token_ids[: self._size])
        known = self._beginnings.get(beginning, root)
        self._beginnings[beginning] = root if known == root else None
        self._beginnings.move_to_end(beginning)
        if len(self._beginnings) > MOST_BEGINNINGS:
            self._beginnings.popitem(last=False)

    def translate(self, events: Sequence[Mapping[str, Any]]) -> list[KvEvent]:
        """The changes that routers may know, in order."""
        before: list[KvEvent] = []
        told = KvEventLog()
        for event in events:
            if self._has_gap(event):
                # The library drops what its buffer cannot hold: what is cached now is unknown.
                self._names.clear()
                self._copies.clear()
                before += [*told.take(), BlocksCleared()]
            # A model with sliding windows reports each; the widest covers all tokens.
            window = int(event.get("window_size") or 0)
            self._window = max(self._window, window)
            data = event.get("data") or {}
            if window == self._window:
                rank = int(event.get("attention_dp_rank") or 0)
                match data.get("type"):
                    case "stored":
                        self._stored(rank, data, told)
                    case "removed":
                        self._removed(rank, data, told)
        return before + told.take()

    def _has_gap(self, event: Mapping[str, Any]) -> bool:
        number = event.get("event_id")
        if not isinstance(number, int):
            return False
        rank = int(event.get("attention_dp_rank") or 0)
        expected = self._next.get(rank, number)
        self._next[rank] = number + 1
        return number > expected

    def _stored(self, rank: int, data: Mapping[str, Any], told: KvEventLog) -> None:
        above = data.get("parent_hash")
        parent = None if above is None else self._names.get((rank, above))
        for number, block in enumerate(data.get("blocks") or ()):
            tokens = [int(token["token_id"]) for token in block.get("tokens") or ()]
            if len(tokens) != self._size:
                # The last, unfinished block of a sequence.
                return
            if number == 0 and above is None:
                parent = self._root(tokens)
            if parent is None:
                return
            name = chain(parent[0], tokens, self._size)[0]
            key = rank, int(block["block_hash"])
            if key not in self._names:
                self._names[key] = name, parent[1]
                self._copies[name] += 1
                if self._copies[name] == 1:
                    told.stored(parent[0], name, tokens, parent[1])
            parent = name, parent[1]

    def _root(self, tokens: list[int]) -> Root | None:
        if tuple(tokens) in self._beginnings:
            return self._beginnings[tuple(tokens)]
        # A prompt shorter than a block: only then does the block hold generated tokens.
        return PLAIN if self._only_plain else None

    def _removed(self, rank: int, data: Mapping[str, Any], told: KvEventLog) -> None:
        for block_hash in data.get("block_hashes") or ():
            found = self._names.pop((rank, int(block_hash)), None)
            if found is None:
                continue
            name = found[0]
            self._copies[name] -= 1
            if not self._copies[name]:
                del self._copies[name]
                told.removed([name])
