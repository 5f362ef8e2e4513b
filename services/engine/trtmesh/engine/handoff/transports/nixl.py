"""KV through NIXL, between any hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from trtmesh.engine.handoff.transports.nixl_agents import (
    NixlOffer,
    OfferingAgent,
    Pools,
    ReadingAgent,
)
from trtmesh.engine.handoff.transports.peers import Peer, PeerCache, PeerSource
from trtmesh.engine.handoff.transports.transport import ShardCopy
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.v1 import kv_transfer_pb2 as pb

MAX_IDLE_SENDERS = 16
"""Most senders connected between reads."""


class Nixl:
    """The Transport of NIXL. Raises TransportUnusable where NIXL is not installed or does not work."""

    kind = pb.KV_TRANSPORT_NIXL

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._offering = OfferingAgent(Pools.of(memory))
        self._offer = self._offering.offer.encode()
        self._senders: PeerCache[_NixlSender] = PeerCache(MAX_IDLE_SENDERS)
        self._sources: set[PeerSource] = set()

    def offer(self) -> bytes:
        self._offering.serve()
        return self._offer

    async def open(self, offer: bytes) -> PeerSource:
        sender = self._senders.find(offer)
        if sender is None or not sender.is_usable:
            self._senders.drop(offer)
            sender = _NixlSender(NixlOffer.decode(offer), self._memory)
            self._senders.add(offer, sender)
        source = PeerSource(sender, self._sources)
        try:
            await sender.connected()
        except BaseException:
            await source.close()
            raise
        finally:
            self._senders.drop_idle()
        return source

    async def close(self) -> None:
        await asyncio.gather(*(source.close() for source in list(self._sources)))
        self._senders.clear()
        await asyncio.to_thread(self._offering.close)


class _NixlSender(Peer):
    """A sender's agent at this receiver, and the agent's thread."""

    def __init__(self, offer: NixlOffer, memory: KvMemory) -> None:
        super().__init__(ThreadPoolExecutor(1, "trtmesh-kv-read"))
        self._agent = self._thread.submit(ReadingAgent, offer, memory)

    @property
    def is_usable(self) -> bool:
        """Also while connecting."""
        if not self._agent.done():
            return True
        return self._agent.exception() is None and self._agent.result().is_usable

    async def connected(self) -> None:
        """Raises TransportUnusable."""
        await asyncio.wait([asyncio.wrap_future(self._agent)])
        self._agent.result()

    def read(self, copies: Sequence[ShardCopy]) -> Iterator[None]:
        return self._agent.result().read(copies)

    def cut(self) -> None:
        self._agent.result().cut()

    def release(self) -> None:
        self._thread.submit(self._destroy)
        self._thread.shutdown(wait=False)

    def _destroy(self) -> None:
        if self._agent.exception() is None:
            self._agent.result().destroy()
