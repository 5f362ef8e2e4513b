"""Follows a worker's KV events in order, and restarts from a snapshot after a gap."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtmesh.router.kv_index.index import KvIndex
from trtmesh.v1 import engine_pb2 as pb


class KvFeed:
    """Feeds a worker's events to the index.

    A new stream, a gap in the sequence numbers and a new epoch each request a snapshot; earlier events are ignored.
    A gap keeps the known blocks, since most are still right; a new epoch clears them.
    """

    def __init__(self, index: KvIndex, address: str, ask_for_snapshot: Callable[[], None]) -> None:
        self._index = index
        self._address = address
        self._ask = ask_for_snapshot
        self._epoch = 0
        self._next: int | None = None
        """Number of the next event; None until the snapshot arrives."""

    def opened(self) -> None:
        """Requests a snapshot on a new stream."""
        self._wait_for_snapshot()

    def lost(self) -> None:
        """Forgets the worker's blocks with the stream."""
        self._next = None
        self._index.forget(self._address)

    def apply(self, events: pb.KvEvents) -> None:
        """Applies events in their order of arrival."""
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
            # Events covered by the snapshot may still arrive.
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
