"""The sender's side of a fetch, against a client that is a test."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from engine.handoff.pairs import PROMPT, SLOW, Pair, lease, pair, release
from engine_streams import MESSAGE_BYTES, PATIENCE_SECONDS, StreamFailed, eventually
from trtmesh.chassis.grpc.client import ClientCall, Method, connected
from trtmesh.engine.handoff.fetch import FETCH
from trtmesh.engine.handoff.fetch_server import MAX_CHUNK_BYTES
from trtmesh.v1 import kv_transfer_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2_grpc

FetchCall = ClientCall[pb.FetchRequest, pb.FetchResponse]

PLAIN = Method(FETCH.path, FETCH.serialize, pb.FetchResponse.FromString)

RECEIVED = pb.FetchRequest(received=pb.PartsReceived())


@asynccontextmanager
async def fetching(both: Pair) -> AsyncIterator[FetchCall]:
    address = both.sender.engine.address
    async with connected(address, MESSAGE_BYTES, PATIENCE_SECONDS) as connection:
        call = connection.open(PLAIN)
        try:
            yield call
        finally:
            call.cancel()


def opening(descriptor: pb.HandoffDescriptor, **fields: Any) -> pb.FetchRequest:
    values: dict[str, Any] = {
        "blocks": pb.WantedBlocks(lease_id=descriptor.lease_id),
        "compatibility_hash": descriptor.compatibility_hash,
        "transport": pb.KV_TRANSPORT_GRPC,
    }
    return pb.FetchRequest(open=pb.OpenFetch(**values | fields))


async def failure(call: FetchCall) -> StreamFailed:
    try:
        while await call.read() is not None:
            pass
    except grpc.aio.AioRpcError as error:
        return StreamFailed.of(error)
    raise AssertionError("the call ended well")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"blocks": pb.WantedBlocks(lease_id="0" * 32)}, "HANDOFF_FAILED"),
        ({"compatibility_hash": b"other"}, "MISMATCH"),
        ({"transport": pb.KV_TRANSPORT_NIXL}, "INVALID_FIELD"),
    ],
)
async def test_fetch_that_does_not_fit_is_refused(fields: dict[str, Any], reason: str) -> None:
    async with pair() as both:
        descriptor = await both.prefill(1, lease())
        async with fetching(both) as call:
            await call.write(opening(descriptor, **fields))
            assert (await failure(call)).reason == reason
        assert both.sender.sent.held == 1
        await both.sender.stream.end(1)
        await both.sender.stream.send(release(descriptor.lease_id))


async def test_fetch_of_some_heads_is_refused() -> None:
    async with pair() as both:
        descriptor = await both.prefill(1, lease())
        some = pb.WantedBlocks(lease_id=descriptor.lease_id, kv_heads=1)
        async with fetching(both) as call:
            await call.write(opening(descriptor, blocks=some))
            assert (await failure(call)).reason == "INVALID_FIELD"
        await both.sender.stream.end(1)
        await both.sender.stream.send(release(descriptor.lease_id))


async def test_first_message_is_open() -> None:
    async with pair() as both, fetching(both) as call:
        await call.write(RECEIVED)
        assert (await failure(call)).reason == "INVALID_REQUEST"


async def test_second_fetch_is_refused_and_the_first_continues() -> None:
    async with pair() as both:
        descriptor = await both.prefill(1, lease())
        async with fetching(both) as first:
            await first.write(opening(descriptor))
            assert await first.read()
            async with fetching(both) as second:
                await second.write(opening(descriptor))
                assert (await failure(second)).reason == "ALREADY_EXISTS"
            await first.write(RECEIVED)
            while response := await first.read():
                last = response
            assert last.HasField("confirmed")
        await both.sender.settled()
        assert both.sender.sent.consumed == 1


async def test_parts_come_in_order_with_their_bytes_before_the_mark() -> None:
    async with pair({"prefill_tokens_per_step": 40}) as both:
        descriptor = await both.prefill(1, lease())
        (shard,) = both.sender.handoffs.own.memory.shards
        async with fetching(both) as call:
            await call.write(opening(descriptor))
            parts, missing = 0, 0
            while (response := await call.read()) and not response.HasField("commit"):
                if response.HasField("part"):
                    assert (response.part.part, missing) == (parts, 0)
                    parts += 1
                    share = shard.block_bytes * response.part.layers // len(shard.layers)
                    missing = share * response.part.blocks
                    assert response.part.checksum
                else:
                    missing -= len(response.chunk.data)
            assert response
            assert missing == 0
            assert response.commit.parts == parts > len(shard.layers)
            assert response.commit.computed_tokens == len(PROMPT)
        await both.sender.settled()
        assert both.sender.sent.released == 1


async def test_grpcs_own_client_fetches_chunks_of_full_size() -> None:
    long = tuple(range(40, 120)) * 40
    options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
    async with pair({"token_bytes": 4096}) as both:
        descriptor = await both.prefill(1, lease(), prompt=long)
        address = both.sender.engine.address
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            stub: Any = kv_transfer_pb2_grpc.KvTransferServiceStub(channel)
            call = stub.Fetch()
            await call.write(opening(descriptor))
            parts: dict[int, list[bytes]] = {}
            while (response := await call.read()) and not response.HasField("commit"):
                if response.HasField("part"):
                    part, parts[response.part.checksum] = response.part, []
                else:
                    parts[part.checksum].append(response.chunk.data)
            await call.write(RECEIVED)
            assert (await call.read()).HasField("confirmed")
        sizes = {len(chunk) for chunks in parts.values() for chunk in chunks}
        assert max(sizes) == MAX_CHUNK_BYTES
        for checksum, chunks in parts.items():
            assert zlib.crc32(b"".join(chunks)) == checksum
        await both.sender.stream.end(1)
        await both.sender.settled()
        assert both.sender.sent.consumed == 1


async def test_received_before_the_mark_breaks_the_protocol() -> None:
    async with pair(SLOW) as both:
        descriptor = await both.prefill(1, lease())
        async with fetching(both) as call:
            await call.write(opening(descriptor))
            await call.write(RECEIVED)
            assert (await failure(call)).reason == "HANDOFF_FAILED"
        end = (await both.sender.stream.end(1)).end
        assert end
        assert end.error.reason == "HANDOFF_FAILED"


async def test_receiver_that_reads_nothing_holds_up_nothing_else() -> None:
    long = tuple(range(40, 120)) * 100
    async with pair({"token_bytes": 4096}, {"token_bytes": 4096}) as both:
        descriptor = await both.prefill(1, lease(), prompt=long)
        async with fetching(both) as call:
            await call.write(opening(descriptor))
            await both.sender.stream.end(1)
            await eventually(lambda: both.sender.handoffs.sent.all()[0]._fetch)
            assert len(await both.hand_over(2)) == 20
            await both.sender.stream.send(release(descriptor.lease_id))
            await eventually(lambda: both.sender.backend.stats().used_blocks == 0)
