"""Hands the files of a worker's pools to other processes of the same user and host.

The files are anonymous, and sealed before the offer: their size is fixed, and nobody can map them writable any more.
Receivers ask at an abstract Unix socket, known in a single network namespace and without a trace in a file system. The
connection stays open: the end of the connection tells each side of the other's end.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import numpy as np
from trtmesh.engine.handoff.transports.transport import TransportUnusable
from trtmesh.engine.kv_memory import Bytes, HostMemory, KvMemory

_log = logging.getLogger(__name__)

_VERSION = 1
_HEAD: Final = "<B16s16sH"
"""Version, name of the socket, token, number of pools."""
_POOL: Final = "<QQ"
_MAX_POOLS = 253
"""SCM_MAX_FD: most files of a message."""
_MAX_RECEIVERS = 256
_TIMEOUT_SECONDS = 2.0
_PAUSE_SECONDS = 0.5
_F_SEAL_FUTURE_WRITE = 16
"""Linux 5.1."""


@dataclass(frozen=True, slots=True)
class PoolFiles:
    """The sealed files of a worker's pools, and their rows."""

    files: tuple[int, ...]
    rows: tuple[Bytes, ...]

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        return tuple((len(rows), rows.shape[1]) for rows in self.rows)


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """The socket of a sender, the expected token, and the pools: their blocks, and the bytes of a block."""

    name: bytes
    token: bytes
    pools: tuple[tuple[int, int], ...]

    @property
    def address(self) -> bytes:
        return b"\0trtmesh-kv-" + self.name.hex().encode()

    def encode(self) -> bytes:
        head = struct.pack(_HEAD, _VERSION, self.name, self.token, len(self.pools))
        return head + b"".join(struct.pack(_POOL, *pool) for pool in self.pools)

    @classmethod
    def decode(cls, data: bytes) -> PoolOffer:
        try:
            version, name, token, count = struct.unpack_from(_HEAD, data)
            pools = tuple(struct.iter_unpack(_POOL, data[struct.calcsize(_HEAD) :]))
        except struct.error as error:
            raise TransportUnusable("the offer is cut off") from error
        if version != _VERSION:
            raise TransportUnusable(f"the offer has version {version}, but this worker {_VERSION}")
        if count != len(pools) or not 0 < count <= _MAX_POOLS:
            raise TransportUnusable(f"the offer announces {count} pools and has {len(pools)}")
        if not all(0 < blocks * size < sys.maxsize for blocks, size in pools):
            raise TransportUnusable("a pool of the offer has an impossible size")
        return cls(name, token, pools)


def sealed_files(memory: KvMemory) -> PoolFiles:
    """Seals the files of all pools. Raises TransportUnusable for pools outside sealable files."""
    if sys.platform != "linux":
        raise TransportUnusable(f"{sys.platform} has no sealed anonymous files")
    pools = [memory.memory(shard) for shard in range(len(memory.shards))]
    hosts = [pool for pool in pools if isinstance(pool, HostMemory)]
    files = tuple(pool.file for pool in hosts if pool.file is not None)
    if len(files) != len(pools) or len(pools) > _MAX_POOLS:
        raise TransportUnusable("a KV pool is not in an anonymous file")
    try:
        for file in files:
            seal(file)
    except OSError as error:
        raise TransportUnusable(f"the file of a KV pool cannot be sealed: {error}") from error
    return PoolFiles(files, tuple(pool.rows for pool in hosts))


def seal(file: int) -> None:
    """Fixes the size of a file, and refuses all writes except through existing mappings."""
    if missing := _seals() & ~fcntl.fcntl(file, fcntl.F_GET_SEALS):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, missing)


class PoolDoor:
    """Gives a worker's files to each receiver with the token of the offer."""

    def __init__(self, pools: PoolFiles) -> None:
        self.offer = PoolOffer(secrets.token_bytes(16), secrets.token_bytes(16), pools.sizes)
        self._files = pools.files
        self._receivers = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.settimeout(0)
            self._listener.bind(self.offer.address)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            raise TransportUnusable(f"the system lacks abstract Unix sockets: {error}") from error

    def close(self) -> None:
        self._listener.close()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as receivers:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    _log.warning("cannot accept a receiver of shared KV: %s", error)
                    await asyncio.sleep(_PAUSE_SECONDS)
                else:
                    receivers.create_task(self._serve_receiver(connection))

    async def _serve_receiver(self, connection: socket.socket) -> None:
        self._receivers += 1
        try:
            with connection:
                if self._receivers > _MAX_RECEIVERS or not await self._admits(connection):
                    return
                socket.send_fds(connection, [b"\0"], self._files)
                await asyncio.get_running_loop().sock_recv(connection, 1)
        except OSError as error:
            _log.info("lost a receiver of shared KV: %s", error)
        finally:
            self._receivers -= 1

    async def _admits(self, connection: socket.socket) -> bool:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            token = await loop.sock_recv(connection, len(self.offer.token) + 1)
        if _peer_user(connection) == os.geteuid() and hmac.compare_digest(token, self.offer.token):
            return True
        _log.warning("refused shared KV to user %d", _peer_user(connection))
        return False


@dataclass(frozen=True, slots=True)
class MappedPools:
    """A sender's pools, mapped read-only, and the connection to the sender."""

    connection: socket.socket
    rows: list[Bytes]


async def map_pools(offer: PoolOffer) -> MappedPools:
    """Maps the pools of a sender. Raises TransportUnusable."""
    try:
        async with asyncio.timeout(_TIMEOUT_SECONDS):
            with ExitStack() as failed:
                connection = failed.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                )
                files = await _ask(connection, offer)
                try:
                    rows = [_map(*each) for each in zip(files, offer.pools, strict=True)]
                finally:
                    for file in files:
                        os.close(file)
                failed.pop_all()
                return MappedPools(connection, rows)
    except (OSError, ValueError) as error:
        raise TransportUnusable(f"the sender's memory cannot be mapped: {error!r}") from error


async def _ask(connection: socket.socket, offer: PoolOffer) -> list[int]:
    """The files of the sender; the caller closes them."""
    loop = asyncio.get_running_loop()
    connection.settimeout(0)
    await loop.sock_connect(connection, offer.address)
    if (user := _peer_user(connection)) != os.geteuid():
        raise TransportUnusable(f"the sender runs as user {user}")
    await loop.sock_sendall(connection, offer.token)
    answered = asyncio.Event()
    loop.add_reader(connection, answered.set)
    try:
        await answered.wait()
    finally:
        loop.remove_reader(connection)
    _, files, _, _ = socket.recv_fds(connection, 1, _MAX_POOLS, socket.MSG_CMSG_CLOEXEC)
    if not files:
        raise TransportUnusable("the sender refused the token")
    return files


def _map(file: int, pool: tuple[int, int]) -> Bytes:
    """Maps a file. Raises TransportUnusable unless sealed: no access may fail."""
    blocks, block_bytes = pool
    if (seals := fcntl.fcntl(file, fcntl.F_GET_SEALS)) & _seals() != _seals():
        raise TransportUnusable(f"the file of a pool has the seals {seals:#x} only")
    if (size := os.fstat(file).st_size) < blocks * block_bytes:
        raise TransportUnusable(
            f"the file of a pool has {size} B, but {blocks * block_bytes} B are offered"
        )
    mapping = mmap.mmap(file, blocks * block_bytes, prot=mmap.PROT_READ)
    return np.frombuffer(mapping, dtype=np.uint8).reshape(blocks, block_bytes)


def _seals() -> int:
    return fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


def _peer_user(connection: socket.socket) -> int:
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    )
    return int(user)
