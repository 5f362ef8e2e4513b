"""KV in shared memory, between processes of the same user and host."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from trtmesh.engine.handoff.transports.block_copy import batches
from trtmesh.engine.handoff.transports.peers import Peer, PeerCache, PeerSource
from trtmesh.engine.handoff.transports.pool_files import (
    MappedPools,
    PoolDoor,
    PoolOffer,
    map_pools,
    sealed_files,
)
from trtmesh.engine.handoff.transports.transport import ShardCopy
from trtmesh.engine.kv_memory import Bytes, KvMemory
from trtmesh.v1 import kv_transfer_pb2 as pb

MAX_IDLE_SENDERS = 64
"""Most senders mapped between reads."""


class SharedMemory:
    """The Transport of pools in anonymous files. Made on the event loop; raises TransportUnusable."""

    kind = pb.KV_TRANSPORT_SHARED_MEMORY

    def __init__(self, memory: KvMemory) -> None:
        pools = sealed_files(memory)
        self._targets = pools.rows
        self._door = PoolDoor(pools)
        self._offer = self._door.offer.encode()
        self._thread = ThreadPoolExecutor(1, "trtmesh-kv-copy")
        self._senders: PeerCache[_MappedSender] = PeerCache(MAX_IDLE_SENDERS)
        self._sources: set[PeerSource] = set()
        self._serving = asyncio.get_running_loop().create_task(self._door.serve())

    def offer(self) -> bytes:
        return self._offer

    async def open(self, offer: bytes) -> PeerSource:
        sender = self._senders.find(offer)
        if sender is None:
            sender = self._added(offer, await map_pools(PoolOffer.decode(offer)))
        source = PeerSource(sender, self._sources)
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

    def _added(self, offer: bytes, pools: MappedPools) -> _MappedSender:
        if known := self._senders.find(offer):
            pools.connection.close()
            return known
        sender = _MappedSender(pools, self._targets, self._thread)
        self._senders.add(offer, sender)
        loop = asyncio.get_running_loop()
        loop.add_reader(pools.connection, self._sender_ended, offer, pools.connection)
        return sender

    def _sender_ended(self, offer: bytes, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        self._senders.drop(offer)


class _MappedSender(Peer):
    """The pools of a sender, mapped."""

    def __init__(self, pools: MappedPools, targets: Sequence[Bytes], thread: Executor) -> None:
        super().__init__(thread)
        self.rows, self._targets = pools.rows, targets
        self._connection = pools.connection

    def read(self, copies: Sequence[ShardCopy]) -> Iterator[None]:
        for batch in batches(copies, self.rows, self._targets):
            for piece in batch:
                piece.copy()
            yield

    def cut(self) -> None:
        """Copies end by themselves."""

    def release(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        # In the thread, since unmapping takes long if many pages were read.
        self._thread.submit(self.rows.clear)
