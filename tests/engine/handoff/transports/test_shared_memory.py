from __future__ import annotations

import asyncio
import gc
import mmap
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from engine.handoff.transports.kv_peer import (
    copied,
    known_bytes,
    memory_of,
    random_copy,
    running_receiver,
    running_sender,
    shard_of,
)
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.engine.handoff.block_plan import Run
from trtmesh.engine.handoff.transports import block_copy, pool_files, shared_memory
from trtmesh.engine.handoff.transports.pool_files import PoolDoor, PoolFiles, PoolOffer
from trtmesh.engine.handoff.transports.shared_memory import SharedMemory
from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy, TransportUnusable
from trtmesh.engine.kv_memory import HostKvMemory, HostMemory, host_memory

BLOCKS, BLOCK_BYTES = 64, 5000
NOBODY = 65534
WHOLE = ShardCopy(0, 0, range(BLOCKS), range(BLOCKS), (Run(0, 0, BLOCK_BYTES),))


@asynccontextmanager
async def transport_of(memory: HostKvMemory) -> AsyncIterator[SharedMemory]:
    transport = SharedMemory(memory)
    try:
        yield transport
    finally:
        await transport.close()


def open_files() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> int:
    """Mapped KV pools."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:trtmesh-kv")


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process changes it
        await asyncio.sleep(0.01)


async def read_random_copies() -> None:
    memory = memory_of(BLOCKS, 3000, pools=2)
    expected = [np.zeros((BLOCKS, 3000), dtype=np.uint8) for _ in range(2)]
    sources = [known_bytes(7 + pool, BLOCKS, BLOCK_BYTES) for pool in range(2)]
    async with (
        running_sender("shared_memory", 7, BLOCKS, BLOCK_BYTES, pools=2) as sender,
        transport_of(memory) as transport,
    ):
        source = await transport.open(sender.offer)
        for seed in range(50):
            one = random_copy(seed, BLOCKS, BLOCK_BYTES, 3000)
            copies = [
                one,
                replace(one, source_shard=1),
                replace(one, source_shard=1, target_shard=1),
            ]
            copied(copies, sources, expected)
            await source.read(copies)
        await source.close()
    for shard in (0, 1):
        assert (memory.memory(shard).rows == expected[shard]).all()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_bytes_of_another_process_are_read(run: Callable[[Any], None]) -> None:
    run(read_random_copies())


async def test_receivers_cannot_write_to_offered_memory() -> None:
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    file = memory.memory(0).file
    assert file is not None
    async with transport_of(memory) as sender, transport_of(memory_of(1, 1)) as receiver:
        source = await receiver.open(sender.offer())
        mapped = source._sender
        assert isinstance(mapped, shared_memory._MappedSender)
        (rows,) = mapped.rows
        assert not rows.flags.writeable
        with pytest.raises(PermissionError):
            mmap.mmap(file, BLOCK_BYTES)
        with pytest.raises(PermissionError):
            os.pwrite(file, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(file, 0)
        memory.memory(0).rows[3] = 9
        assert (rows[3] == 9).all()
        await source.close()


async def test_killed_sender_is_read_to_the_end_and_unmapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_copy, "BATCH_BYTES", BLOCK_BYTES)
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    before = mappings()
    async with transport_of(memory) as transport:
        async with running_sender("shared_memory", 3, BLOCKS, BLOCK_BYTES) as sender:
            source = await transport.open(sender.offer)
            reading = asyncio.create_task(source.read([WHOLE]))
            await until(lambda: bool(memory.memory(0).rows[0].any()))
            sender.signal(signal.SIGKILL)
            await sender.process.wait()
            await reading
        assert (memory.memory(0).rows == known_bytes(3, BLOCKS, BLOCK_BYTES)).all()
        await source.close()
        await until(lambda: mappings() == before)
        with pytest.raises(TransportUnusable):
            await transport.open(sender.offer)


async def test_frozen_sender_is_unusable_unless_it_is_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    async with (
        running_sender("shared_memory", 3, BLOCKS, BLOCK_BYTES) as sender,
        transport_of(memory) as one,
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as other,
    ):
        source = await one.open(sender.offer)
        await sender.freeze()
        await source.read([WHOLE])
        assert (memory.memory(0).rows == known_bytes(3, BLOCKS, BLOCK_BYTES)).all()
        monkeypatch.setattr(pool_files, "_TIMEOUT_SECONDS", 0.3)
        with pytest.raises(TransportUnusable, match="TimeoutError"):
            await other.open(sender.offer)


async def test_killed_receiver_leaves_nothing_at_the_sender() -> None:
    async with transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as transport:
        before = open_files()
        for _ in range(2):
            receiving = running_receiver("shared_memory", 64, 5000, transport.offer())
            async with receiving as receiver:
                assert await receiver.line() == "open"
                receiver.signal(signal.SIGKILL)
        await until(lambda: open_files() == before)


async def test_another_token_is_refused() -> None:
    async with (
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as sender,
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as receiver,
    ):
        offer = PoolOffer.decode(sender.offer())
        before = open_files()
        with pytest.raises(TransportUnusable, match="token"):
            await receiver.open(replace(offer, token=bytes(16)).encode())
        await until(lambda: open_files() == before)
        await (await receiver.open(sender.offer())).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
async def test_processes_of_other_users_are_refused() -> None:
    async with transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as transport:
        foreign = running_receiver("shared_memory", 64, 5000, transport.offer(), user=NOBODY)
        async with foreign as receiver:
            assert await receiver.line() == "unusable"
        async with running_sender("shared_memory", 3, 64, 5000, user=NOBODY) as sender:
            with pytest.raises(TransportUnusable, match=str(NOBODY)):
                await transport.open(sender.offer)


def sealed_file(size: int) -> int:
    file = host_memory(1, size).file
    assert file is not None
    sealed = os.dup(file)
    pool_files.seal(sealed)
    return sealed


@pytest.mark.parametrize("kind", ["short", "unsealed", "regular"])
async def test_unfit_files_are_not_mapped(kind: str, tmp_path: Path) -> None:
    rows = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    memory = host_memory(BLOCKS, BLOCK_BYTES if kind == "unsealed" else BLOCK_BYTES - 1)
    assert memory.file is not None
    if kind == "short":
        pool_files.seal(memory.file)
    with (tmp_path / "pool").open("w+b") as regular:
        regular.truncate(rows.size)
        file = regular.fileno() if kind == "regular" else memory.file
        door = PoolDoor(PoolFiles((file,), (rows,)))
        serving = asyncio.create_task(door.serve())
        async with transport_of(memory_of(1, 1)) as transport:
            with pytest.raises(TransportUnusable):
                await transport.open(door.offer.encode())
        serving.cancel()
        await asyncio.wait([serving])
        door.close()


async def test_opened_sources_leak_neither_files_nor_mappings() -> None:
    async with (
        running_sender("shared_memory", 3, BLOCKS, BLOCK_BYTES) as sender,
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as transport,
    ):
        sources = await asyncio.gather(*(transport.open(sender.offer) for _ in range(50)))
        before = open_files(), mappings()
        for _ in range(100):
            source = await transport.open(sender.offer)
            await source.read([WHOLE])
            await source.close()
        assert (open_files(), mappings()) == before
        for source in sources:
            await source.close()


async def test_idle_senders_are_unmapped_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MAX_IDLE_SENDERS", 0)
    memories = [memory_of(1, 8) for _ in range(3)]
    before = open_files(), mappings()
    async with (
        transport_of(memories[0]) as receiver,
        transport_of(memories[1]) as one,
        transport_of(memories[2]) as other,
    ):
        used = await receiver.open(one.offer())
        await (await receiver.open(other.offer())).close()
        await (await receiver.open(one.offer())).close()
        assert one.offer() in receiver._senders
        assert other.offer() not in receiver._senders
        await used.close()
    await until(lambda: (open_files(), mappings()) == before)


@asynccontextmanager
async def busy_thread(transport: SharedMemory) -> AsyncIterator[threading.Event]:
    """Holds copies back until the event is set."""
    go_on = threading.Event()
    transport._thread.submit(go_on.wait)
    try:
        yield go_on
    finally:
        go_on.set()


async def test_close_returns_after_the_copy_in_progress() -> None:
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    async with (
        running_sender("shared_memory", 3, BLOCKS, BLOCK_BYTES) as sender,
        transport_of(memory) as transport,
        busy_thread(transport) as go_on,
    ):
        source = await transport.open(sender.offer)
        reading = asyncio.create_task(source.read([WHOLE]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(source.close())
        assert (await asyncio.wait([closing], timeout=0.1))[1]
        go_on.set()
        await closing
        after = memory.memory(0).rows.copy()
        with pytest.raises(ReadFailed):
            await reading
        assert after.any()
        assert (memory.memory(0).rows == after).all()


async def test_cancelled_read_ends_after_the_copy_in_progress() -> None:
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    async with (
        running_sender("shared_memory", 3, BLOCKS, BLOCK_BYTES) as sender,
        transport_of(memory) as transport,
        busy_thread(transport) as go_on,
    ):
        source = await transport.open(sender.offer)
        reading = asyncio.create_task(source.read([WHOLE]))
        await asyncio.sleep(0)
        reading.cancel()
        assert (await asyncio.wait([reading], timeout=0.1))[1]
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert memory.memory(0).rows.any()


async def test_reads_outside_of_the_pools_fail() -> None:
    async with (
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as sender,
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as receiver,
    ):
        source = await receiver.open(sender.offer())
        with pytest.raises(ReadFailed):
            await source.read([replace(WHOLE, source_blocks=range(1, BLOCKS + 1))])


@given(st.binary(max_size=50))
def test_any_other_bytes_are_no_offer(data: bytes) -> None:
    with pytest.raises(TransportUnusable):
        PoolOffer.decode(data)


@pytest.mark.parametrize("pools", [(), ((0, 8),), ((8, 0),), ((2**40, 2**40),), ((1, 8),) * 254])
def test_impossible_pools_are_refused(pools: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(TransportUnusable):
        PoolOffer.decode(PoolOffer(bytes(16), bytes(16), pools).encode())


async def test_pools_without_a_file_are_unusable() -> None:
    private = HostMemory(np.zeros((2, 8), dtype=np.uint8))
    with pytest.raises(TransportUnusable):
        SharedMemory(HostKvMemory([shard_of(8)], [private]))


async def test_other_systems_are_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TransportUnusable, match="darwin"):
        SharedMemory(memory_of(1, 8))
