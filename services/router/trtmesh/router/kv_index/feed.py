"""Follows one worker's KV events: in order and without a gap, or from a snapshot anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtmesh.router.kv_index.index import KvIndex
from trtmesh.v1 import engine_pb2 as pb


class KvFeed:
    """Between one worker's stream and the index.

    A new stream, a gap in the numbers and a new epoch ask for a snapshot, once; until it comes events are not taken.
    After a gap what was known stays meanwhile, most of which is right; after a new epoch nothing of it is.
    """

    def __init__(self, index: KvIndex, address: str, ask_for_snapshot: Callable[[], None]) -> None:
        self._index = index
        self._address = address
        self._ask = ask_for_snapshot
        self._epoch = 0
        self._next: int | None = None
        """Number of the next event; None while a snapshot is awaited."""

    def opened(self) -> None:
        """A stream to the worker is open: what it has is not known yet."""
        self._wait_for_snapshot()

    def lost(self) -> None:
        """The stream is over, and with it what was known."""
        self._next = None
        self._index.forget(self._address)

    def take(self, events: pb.KvEvents) -> None:
        """Events as they came."""
        if events.snapshot:
            self._index.clear(self._address)
            self._apply(events.events)
            self._epoch, self._next = events.epoch, events.first_sequence
        elif self._next is None:
            return
        elif events.epoch != self._epoch:
            self._index.clear(self._address)
            self._wait_for_snapshot()
        elif events.first_sequence > self._next:
            self._wait_for_snapshot()
        else:
            # What a snapshot covered may still come.
            self._apply(events.events[self._next - events.first_sequence :])
            self._next = max(self._next, events.first_sequence + len(events.events))

    def _wait_for_snapshot(self) -> None:
        self._next = None
        self._ask()

    def _apply(self, events: Sequence[pb.KvEvent]) -> None:
        for event in events:
            match event.WhichOneof("event"):
                case "stored":
                    self._index.store(self._address, event.stored.block_hashes)
                case "removed":
                    self._index.remove(self._address, event.removed.block_hashes)
                case "cleared":
                    self._index.clear(self._address)
