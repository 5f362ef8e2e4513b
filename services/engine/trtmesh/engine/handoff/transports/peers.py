"""Senders connected between handoffs, and the reads from each."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy, to_the_end

CLOSE_SECONDS = 2.0
"""Time for a read to end alone after the close of the source. Then all reads from the sender are cut."""


class Peer(ABC):
    """A sender. All resources are released when the last user leaves."""

    def __init__(self, thread: Executor) -> None:
        """`thread` takes the steps of reads."""
        self._thread = thread
        self._users = 0

    @property
    def is_idle(self) -> bool:
        """Whether the cache is the only user."""
        return self._users == 1

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        if not self._users:
            self.release()

    @abstractmethod
    def read(self, copies: Sequence[ShardCopy]) -> Iterator[None]:
        """A read in steps. Raises ReadFailed."""

    def next_step(self, remaining: Iterator[None]) -> asyncio.Future[bool]:
        """Continues a read. Returns whether more is to read."""
        return asyncio.get_running_loop().run_in_executor(self._thread, _has_next, remaining)

    @abstractmethod
    def cut(self) -> None:
        """Ends all reads still in progress."""

    @abstractmethod
    def release(self) -> None:
        """Gives the resources back."""


def _has_next(remaining: Iterator[None]) -> bool:
    for _ in remaining:
        return True
    return False


class PeerSource:
    """The Source of a connected sender."""

    def __init__(self, sender: Peer, open_sources: set[PeerSource]) -> None:
        self._sender = sender
        self._open_sources = open_sources
        self._reading: set[asyncio.Future[bool]] = set()
        sender.enter()
        open_sources.add(self)

    async def read(self, copies: Sequence[ShardCopy]) -> None:
        remaining = self._sender.read(copies)
        while await self._has_read(remaining):
            pass

    async def close(self) -> None:
        if self in self._open_sources:
            self._open_sources.remove(self)
            self._sender.leave()
        if self._reading:
            await asyncio.wait(self._reading, timeout=CLOSE_SECONDS)
        while self._reading:
            self._sender.cut()
            await asyncio.wait(self._reading)

    async def _has_read(self, remaining: Iterator[None]) -> bool:
        if self not in self._open_sources:
            raise ReadFailed("the receiver closed the connection to the sender")
        reading = self._sender.next_step(remaining)
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return await to_the_end(reading)


P = TypeVar("P", bound=Peer)


class PeerCache(Generic[P]):
    """Peers by their offers. Of idle peers, the least recently used are dropped."""

    def __init__(self, most_idle: int) -> None:
        self._most_idle = most_idle
        self._peers: dict[bytes, P] = {}

    def __contains__(self, offer: bytes) -> bool:
        return offer in self._peers

    def __len__(self) -> int:
        return len(self._peers)

    def add(self, offer: bytes, peer: P) -> None:
        peer.enter()
        self._peers[offer] = peer

    def find(self, offer: bytes) -> P | None:
        if peer := self._peers.pop(offer, None):
            self._peers[offer] = peer
        return peer

    def drop(self, offer: bytes) -> None:
        if peer := self._peers.pop(offer, None):
            peer.leave()

    def drop_idle(self) -> None:
        idle = [offer for offer, peer in self._peers.items() if peer.is_idle]
        for offer in idle[: max(0, len(idle) - self._most_idle)]:
            self.drop(offer)

    def clear(self) -> None:
        for offer in list(self._peers):
            self.drop(offer)
