"""A worker in a process of its own. `send` offers pools of known bytes until its standard input ends; `receive` opens
an offer, prints whether it could, and reads until it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from trtmesh.engine.handoff.block_plan import Run
from trtmesh.engine.handoff.transports.nixl import Nixl
from trtmesh.engine.handoff.transports.shared_memory import SharedMemory
from trtmesh.engine.handoff.transports.transport import ShardCopy, Transport, TransportUnusable
from trtmesh.engine.kv_memory import Bytes, HostKvMemory, KvMemory, Shard, host_memory

TRANSPORTS: dict[str, Callable[[KvMemory], Transport]] = {
    "shared_memory": SharedMemory,
    "nixl": Nixl,
}


def shard_of(block_bytes: int) -> Shard:
    return Shard(range(1), range(1), 1, block_bytes // 2, 1, 1)


def memory_of(blocks: int, block_bytes: int, pools: int = 1) -> HostKvMemory:
    return HostKvMemory(
        [shard_of(block_bytes)] * pools, [host_memory(blocks, block_bytes) for _ in range(pools)]
    )


def known_bytes(seed: int, blocks: int, block_bytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def random_copy(seed: int, blocks: int, source_bytes: int, target_bytes: int) -> ShardCopy:
    """Some runs between some blocks in random order; neither targets nor runs overlap."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    size = int(rng.integers(1, min(source_bytes, target_bytes) // count + 1))
    sources = np.sort(rng.integers(0, source_bytes - size + 1, count)).tolist()
    room = target_bytes - count * size
    targets = (np.sort(rng.integers(0, room + 1, count)) + np.arange(count) * size).tolist()
    number = int(rng.integers(1, blocks))
    return ShardCopy(
        0,
        0,
        rng.integers(0, blocks, number).tolist(),
        rng.permutation(blocks)[:number].tolist(),
        tuple(Run(source, target, size) for source, target in zip(sources, targets, strict=True)),
    )


def copied(copies: Sequence[ShardCopy], sources: Sequence[Bytes], targets: Sequence[Bytes]) -> None:
    """Carries copies out, byte range by byte range."""
    for copy in copies:
        source, target = sources[copy.source_shard], targets[copy.target_shard]
        for one, other in zip(copy.source_blocks, copy.target_blocks, strict=True):
            for run in copy.runs:
                data = source[one, run.source : run.source + run.size]
                target[other, run.target : run.target + run.size] = data


@dataclass(frozen=True, slots=True)
class Peer:
    """A running worker."""

    process: asyncio.subprocess.Process

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def freeze(self) -> None:
        """Stops every thread of the process; `signal` returns before they have stopped."""
        self.signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, self.process.pid, os.WSTOPPED)

    async def line(self) -> str:
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()


@dataclass(frozen=True, slots=True)
class Sender(Peer):
    offer: bytes


@contextlib.asynccontextmanager
async def running_sender(
    transport: str,
    seed: int,
    blocks: int,
    block_bytes: int,
    *,
    pools: int = 1,
    user: int | None = None,
) -> AsyncIterator[Sender]:
    arguments = ("send", transport, seed, blocks, block_bytes, pools)
    async with _running(*arguments, user=user) as peer:
        yield Sender(peer.process, bytes.fromhex(await peer.line()))


@contextlib.asynccontextmanager
async def running_receiver(
    transport: str, blocks: int, block_bytes: int, offer: bytes, *, user: int | None = None
) -> AsyncIterator[Peer]:
    async with _running("receive", transport, blocks, block_bytes, offer.hex(), user=user) as peer:
        yield peer


@contextlib.asynccontextmanager
async def _running(*arguments: str | int, user: int | None) -> AsyncIterator[Peer]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, str(user or os.geteuid()), *map(str, arguments)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield Peer(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def send(transport: str, seed: int, blocks: int, block_bytes: int, pools: int) -> None:
    memory = memory_of(blocks, block_bytes, pools)
    for pool in range(pools):
        memory.memory(pool).rows[:] = known_bytes(seed + pool, blocks, block_bytes)
    sender = TRANSPORTS[transport](memory)
    try:
        print(sender.offer().hex(), flush=True)
        while await asyncio.to_thread(os.read, 0, 1):
            pass
    finally:
        await sender.close()


async def receive(transport: str, blocks: int, block_bytes: int, offer: bytes) -> None:
    receiver = TRANSPORTS[transport](memory_of(blocks, block_bytes))
    try:
        source = await receiver.open(offer)
        print("open", flush=True)
        whole = ShardCopy(0, 0, range(blocks), range(blocks), (Run(0, 0, block_bytes),))
        while True:
            await source.read([whole])
    except TransportUnusable:
        print("unusable", flush=True)
    finally:
        await receiver.close()


def main(user: str, role: str, transport: str, *rest: str) -> None:
    known_bytes(0, 1, 1)  # loads what another user may not be able to read
    os.setuid(int(user))
    if role == "send":
        seed, blocks, block_bytes, pools = map(int, rest)
        asyncio.run(send(transport, seed, blocks, block_bytes, pools))
    else:
        asyncio.run(receive(transport, int(rest[0]), int(rest[1]), bytes.fromhex(rest[2])))


if __name__ == "__main__":
    main(*sys.argv[1:])
