"""Senders that a transport stays connected to, between the handoffs from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar


class Peer(ABC):
    """Resources that are released when the last user leaves."""

    def __init__(self) -> None:
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
    def release(self) -> None:
        """Gives the resources back."""


P = TypeVar("P", bound=Peer)


class PeerCache(Generic[P]):
    """Peers by their offers. Of the idle ones, the least recently used are dropped."""

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
