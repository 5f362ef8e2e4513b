"""KV in shared memory, between processes of one user on one host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from trtmesh.engine.handoff.transports.block_copy import Piece, batches
from trtmesh.engine.handoff.transports.peers import Peer, PeerCache
from trtmesh.engine.handoff.transports.pool_files import (
    MappedPools,
    Offer,
    PoolDoor,
    map_pools,
    sealed_files,
)
from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy, to_the_end
from trtmesh.engine.kv_memory import Bytes, KvMemory
from trtmesh.v1 import kv_transfer_pb2 as pb

MAX_IDLE_SENDERS = 64
"""Senders that stay mapped between reads."""


class SharedMemory:
    """The Transport of pools in anonymous files. Made on the event loop; raises TransportUnusable."""

    def __init__(self, memory: KvMemory) -> None:
        pools = sealed_files(memory)
        self._targets = pools.rows
        self._door = PoolDoor(pools)
        self._offer = self._door.offer.encode()
        self._thread = ThreadPoolExecutor(1, "trtmesh-kv-copy")
        self._senders: PeerCache[_Sender] = PeerCache(MAX_IDLE_SENDERS)
        self._sources: set[SharedSource] = set()
        self._serving = asyncio.get_running_loop().create_task(self._door.serve())

    @property
    def kind(self) -> pb.KvTransport.ValueType:
        return pb.KV_TRANSPORT_SHARED_MEMORY

    def offer(self) -> bytes:
        return self._offer

    async def open(self, offer: bytes) -> SharedSource:
        sender = self._senders.find(offer)
        if sender is None:
            sender = self._added(offer, await map_pools(Offer.decode(offer)))
        source = SharedSource(sender, self._targets, self._thread, self._sources)
        self._senders.drop_idle()
        return source

    async def close(self) -> None:
        for source in list(self._sources):
            await source.close()
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._door.close()
        self._senders.clear()
        self._thread.shutdown(wait=False)

    def _added(self, offer: bytes, pools: MappedPools) -> _Sender:
        if known := self._senders.find(offer):
            pools.connection.close()
            return known
        sender = _Sender(pools, self._thread)
        self._senders.add(offer, sender)
        loop = asyncio.get_running_loop()
        loop.add_reader(pools.connection, self._sender_ended, offer, pools.connection)
        return sender

    def _sender_ended(self, offer: bytes, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        self._senders.drop(offer)


class _Sender(Peer):
    """The pools of a sender, mapped."""

    def __init__(self, pools: MappedPools, thread: Executor) -> None:
        super().__init__()
        self.rows = pools.rows
        self._connection = pools.connection
        self._thread = thread

    def release(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        # In the thread, since unmapping takes long if many pages were read.
        self._thread.submit(self.rows.clear)


class SharedSource:
    """The Source of a mapped sender."""

    def __init__(
        self,
        sender: _Sender,
        targets: Sequence[Bytes],
        thread: Executor,
        open_sources: set[SharedSource],
    ) -> None:
        self._sender = sender
        self._targets = targets
        self._thread = thread
        self._open_sources = open_sources
        self._copying: set[asyncio.Future[bool]] = set()
        sender.enter()
        open_sources.add(self)

    @property
    def state(self) -> bytes:
        return b""

    async def read(self, copies: Sequence[ShardCopy]) -> None:
        remaining = batches(copies, self._sender.rows, self._targets)
        while await self._copied(remaining):
            pass

    async def close(self) -> None:
        if self in self._open_sources:
            self._open_sources.remove(self)
            self._sender.leave()
        while self._copying:
            await asyncio.wait(self._copying)

    async def _copied(self, remaining: Iterator[list[Piece]]) -> bool:
        if self not in self._open_sources:
            raise ReadFailed("the receiver closed the connection to the sender")
        loop = asyncio.get_running_loop()
        copying = loop.run_in_executor(self._thread, _copy_next, remaining)
        self._copying.add(copying)
        copying.add_done_callback(self._copying.discard)
        return await to_the_end(copying)


def _copy_next(remaining: Iterator[list[Piece]]) -> bool:
    """Copies a batch; False at the end."""
    for batch in remaining:
        for piece in batch:
            piece.copy()
        return True
    return False
