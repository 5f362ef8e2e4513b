from __future__ import annotations

import asyncio
import importlib.util
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from engine.handoff.transports.kv_peer import (
    copied,
    known_bytes,
    memory_of,
    random_copy,
    running_receiver,
    running_sender,
)
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.engine.handoff.block_plan import Run
from trtmesh.engine.handoff.transports import nixl, nixl_agents, peers
from trtmesh.engine.handoff.transports.nixl import Nixl
from trtmesh.engine.handoff.transports.nixl_agents import NixlOffer, Pool, Pools
from trtmesh.engine.handoff.transports.transport import ReadFailed, ShardCopy, TransportUnusable
from trtmesh.engine.kv_memory import HostKvMemory

BLOCKS, BLOCK_BYTES = 64, 5000
WHOLE = ShardCopy(0, 0, range(BLOCKS), range(BLOCKS), (Run(0, 0, BLOCK_BYTES),))

installed = pytest.mark.skipif(
    not any(map(importlib.util.find_spec, nixl_agents._PACKAGES)),
    reason="nixl-cu12 has no wheel for this system",
)


@asynccontextmanager
async def transport_of(memory: HostKvMemory) -> AsyncIterator[Nixl]:
    transport = Nixl(memory)
    try:
        yield transport
    finally:
        await transport.close()


@installed
@pytest.mark.parametrize("tls", [None, "tcp"])
async def test_bytes_of_another_process_are_read(
    tls: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setattr(nixl_agents, "_REQUEST_BYTES", 50_000)
    memory = memory_of(BLOCKS, 3000, pools=2)
    expected = [np.zeros((BLOCKS, 3000), dtype=np.uint8) for _ in range(2)]
    sources = [known_bytes(7 + pool, BLOCKS, BLOCK_BYTES) for pool in range(2)]
    async with (
        running_sender("nixl", 7, BLOCKS, BLOCK_BYTES, pools=2) as sender,
        transport_of(memory) as transport,
    ):
        for seed in range(20):
            one = random_copy(seed, BLOCKS, BLOCK_BYTES, 3000)
            copies = [one, replace(one, source_shard=1, target_shard=1)]
            copied(copies, sources, expected)
            source = await transport.open(sender.offer)
            await source.read(copies)
            await source.close()
    for shard in (0, 1):
        assert (memory.memory(shard).rows == expected[shard]).all()


@installed
async def test_killed_sender_fails_reads_until_it_is_opened_again() -> None:
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    async with transport_of(memory) as transport:
        async with running_sender("nixl", 3, BLOCKS, BLOCK_BYTES) as sender:
            source = await transport.open(sender.offer)
            await source.read([WHOLE])
            sender.signal(signal.SIGKILL)
            await sender.process.wait()
            with pytest.raises(ReadFailed):
                await source.read([WHOLE])
            with pytest.raises(ReadFailed):
                await source.read([WHOLE])
            await source.close()
        async with running_sender("nixl", 4, BLOCKS, BLOCK_BYTES) as sender:
            source = await transport.open(sender.offer)
            await source.read([WHOLE])
            await source.close()
    assert (memory.memory(0).rows == known_bytes(4, BLOCKS, BLOCK_BYTES)).all()


@installed
async def test_read_from_a_frozen_sender_ends_with_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(peers, "CLOSE_SECONDS", 0.1)
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    async with (
        running_sender("nixl", 3, BLOCKS, BLOCK_BYTES) as sender,
        transport_of(memory) as transport,
    ):
        source = await transport.open(sender.offer)
        await source.read([WHOLE])
        memory.memory(0).rows[:] = 0
        await sender.freeze()
        reading = asyncio.create_task(source.read([WHOLE]))
        assert (await asyncio.wait([reading], timeout=0.3))[1]
        reading.cancel()
        assert (await asyncio.wait([reading], timeout=0.1))[1]
        await source.close()
        after = memory.memory(0).rows.copy()
        with pytest.raises(asyncio.CancelledError):
            await reading
        sender.signal(signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert (memory.memory(0).rows == after).all()
        (offer,) = transport._senders._peers
        assert not transport._senders._peers[offer].is_usable


@installed
async def test_a_worker_serves_without_delay_from_its_first_offer_on() -> None:
    async with transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as transport:
        assert not transport._offering.serves
        transport.offer()
        assert transport._offering.serves


@installed
async def test_killed_receivers_leave_the_sender_usable() -> None:
    memory = memory_of(BLOCKS, BLOCK_BYTES)
    async with (
        running_sender("nixl", 3, BLOCKS, BLOCK_BYTES) as sender,
        transport_of(memory) as transport,
    ):
        for _ in range(2):
            async with running_receiver("nixl", BLOCKS, BLOCK_BYTES, sender.offer) as receiver:
                assert await receiver.line() == "open"
                receiver.signal(signal.SIGKILL)
        source = await transport.open(sender.offer)
        await source.read([WHOLE])
        await source.close()
    assert (memory.memory(0).rows == known_bytes(3, BLOCKS, BLOCK_BYTES)).all()


@installed
async def test_idle_senders_are_forgotten_beyond_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "MAX_IDLE_SENDERS", 1)
    async with (
        transport_of(memory_of(1, 8)) as receiver,
        transport_of(memory_of(1, 8)) as one,
        transport_of(memory_of(1, 8)) as other,
    ):
        for sender in (one, other, one, one):
            await (await receiver.open(sender.offer())).close()
        assert len(receiver._senders) == 2
        await (await receiver.open(one.offer())).close()
        assert one.offer() in receiver._senders


@installed
async def test_unknown_metadata_is_unusable() -> None:
    async with transport_of(memory_of(1, 8)) as transport:
        offer = NixlOffer.decode(transport.offer())
        with pytest.raises(TransportUnusable):
            await transport.open(replace(offer, metadata=b"other").encode())
        assert not transport._sources


@installed
async def test_reads_outside_of_the_pools_fail() -> None:
    async with (
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as sender,
        transport_of(memory_of(BLOCKS, BLOCK_BYTES)) as receiver,
    ):
        source = await receiver.open(sender.offer())
        with pytest.raises(ReadFailed):
            await source.read([replace(WHOLE, source_blocks=range(1, BLOCKS + 1))])
        await source.read([WHOLE])
        await source.close()


async def test_missing_package_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    nixl_agents._api.cache_clear()
    for package in nixl_agents._PACKAGES:
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
    with pytest.raises(TransportUnusable, match="nixl-cu12"):
        Nixl(memory_of(1, 8))


def test_offers_are_decoded() -> None:
    offer = NixlOffer(
        Pools(on_device=True, pools=(Pool(4096, 10, 64, 1), Pool(8192, 10, 32, 0))), b"agent"
    )
    assert NixlOffer.decode(offer.encode()) == offer


@given(st.binary(max_size=36))
def test_cut_offers_are_refused(data: bytes) -> None:
    with pytest.raises(TransportUnusable):
        NixlOffer.decode(data)
    whole = NixlOffer(Pools(on_device=False, pools=(Pool(4096, 10, 64),)), b"agent").encode()
    with pytest.raises(TransportUnusable):
        NixlOffer.decode(whole[: len(data) % (len(whole) - 5)])
