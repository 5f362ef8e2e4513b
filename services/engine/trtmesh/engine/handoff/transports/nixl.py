"""KV through NIXL, between any hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from trtmesh.engine.handoff.transports.nixl_agents import (
    Offer,
    OfferingAgent,
    Pools,
    ReadingAgent,
)
from trtmesh.engine.handoff.transports.peers import Peer, PeerCache
from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy, to_the_end
from trtmesh.engine.kv_memory import KvMemory
from trtmesh.v1 import kv_transfer_pb2 as pb

MAX_IDLE_SENDERS = 16
"""Senders that stay connected between reads."""
CLOSE_SECONDS = 2.0
"""Time for a read to end by itself when its source is closed. Then all reads from the sender are cut."""


class Nixl:
    """The Transport of NIXL. Raises TransportUnusable where NIXL is not installed or does not work."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._offering = OfferingAgent(Pools.of(memory))
        self._offer = self._offering.offer.encode()
        self._senders: PeerCache[_Sender] = PeerCache(MAX_IDLE_SENDERS)
        self._sources: set[NixlSource] = set()

    @property
    def kind(self) -> pb.KvTransport.ValueType:
        return pb.KV_TRANSPORT_NIXL

    def offer(self) -> bytes:
        self._offering.serve()
        return self._offer

    async def open(self, offer: bytes) -> NixlSource:
        sender = self._senders.find(offer)
        if sender is None or not sender.is_usable:
            self._senders.drop(offer)
            sender = _Sender(Offer.decode(offer), self._memory)
            self._senders.add(offer, sender)
        source = NixlSource(sender, self._sources)
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


class _Sender(Peer):
    """A sender's agent at this receiver, and its thread."""

    def __init__(self, offer: Offer, memory: KvMemory) -> None:
        super().__init__()
        self._thread = ThreadPoolExecutor(1, "trtmesh-kv-read")
        self._agent = self._thread.submit(ReadingAgent, offer, memory)

    @property
    def is_usable(self) -> bool:
        """Also while it connects."""
        if not self._agent.done():
            return True
        return self._agent.exception() is None and self._agent.result().is_usable

    async def connected(self) -> None:
        """Raises TransportUnusable."""
        await asyncio.wait([asyncio.wrap_future(self._agent)])
        self._agent.result()

    def read(self, copies: Sequence[ShardCopy]) -> Iterator[None]:
        return self._agent.result().read(copies)

    def next_step(self, remaining: Iterator[None]) -> asyncio.Future[bool]:
        """Continues a read; False at its end."""
        return asyncio.wrap_future(self._thread.submit(_has_next, remaining))

    def cut(self) -> None:
        """Ends all reads."""
        self._agent.result().cut()

    def release(self) -> None:
        self._thread.submit(self._destroy)
        self._thread.shutdown(wait=False)

    def _destroy(self) -> None:
        if self._agent.exception() is None:
            self._agent.result().destroy()


def _has_next(remaining: Iterator[None]) -> bool:
    for _ in remaining:
        return True
    return False


class NixlSource:
    """The Source of a connected sender."""

    def __init__(self, sender: _Sender, open_sources: set[NixlSource]) -> None:
        self._sender = sender
        self._open_sources = open_sources
        self._reading: set[asyncio.Future[bool]] = set()
        sender.enter()
        open_sources.add(self)

    @property
    def state(self) -> bytes:
        return b""

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
