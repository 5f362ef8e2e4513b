"""KV events as a gateway receives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from engine_streams import PATIENCE_SECONDS, serving
from recording_backend import IDLE, INFO, RecordingBackend
from smg_grpc_proto.generated import common_pb2
from trtllm_client import offering, refusal, stub_of
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.engine.backend import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, StepOutput
from trtmesh.engine.gateways.trtllm import kv_feed, servicer
from trtmesh.engine.gateways.trtllm.kv_feed import first_number

SIZE = INFO.tokens_per_block
HIGH = 2**64 - 5
"""A block name that does not fit a signed number."""


class Gateway:
    """A subscriber that keeps an index as gateways do."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.number = 0
        self.loads: list[Any] = []
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.batches: list[Any] = []

    async def receive(self) -> Any:
        """The next batch; checks the numbers and applies the events."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            batch = await self.call.read()
        assert batch is not grpc.aio.EOF
        if batch.HasField("load"):
            self.loads.append(batch.load)
            assert batch.load.load_only
            assert batch.sequence_number == self.number
            assert not batch.events
            return batch
        if batch.HasField("snapshot") and batch.snapshot.index == 0:
            assert batch.events[0].WhichOneof("data") == "cleared"
        else:
            assert batch.sequence_number == self.number + 1
        self.number = batch.sequence_number
        self.batches.append(batch)
        for event in batch.events:
            self._apply(event)
        return batch

    async def until(self, condition: Any) -> None:
        while not condition():
            await self.receive()

    def _apply(self, event: Any) -> None:
        match event.WhichOneof("data"):
            case "stored":
                stored = event.stored
                parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                assert parent is None or parent in self.blocks
                for block in stored.blocks:
                    assert block.block_size == len(block.token_ids) == SIZE
                    self.blocks[block.block_hash] = (parent, list(block.token_ids))
                    parent = block.block_hash
            case "removed":
                for block in event.removed.block_hashes:
                    del self.blocks[block]
            case _:
                self.blocks.clear()


@asynccontextmanager
async def subscribed(stub: Any, start: int = 0) -> AsyncIterator[Gateway]:
    asked = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
    call = stub.SubscribeKvEvents(asked)
    gateway = Gateway(call)
    try:
        if start == 0:
            await gateway.until(lambda: _snapshot_is_whole(gateway))
        yield gateway
    finally:
        call.cancel()


def _snapshot_is_whole(gateway: Gateway) -> bool:
    if not gateway.batches:
        return False
    chunk = gateway.batches[-1].snapshot
    return bool(chunk.index + 1 == chunk.count)


def tell(backend: RecordingBackend, *events: KvEvent) -> None:
    backend.deliver(StepOutput(backend.stats_now.step_count + 1, kv_events=list(events)))


def stored(parent: int, *blocks: int) -> BlocksStored:
    tokens = [block % 1000 for block in blocks for _ in range(SIZE)]
    return BlocksStored(parent, list(blocks), tokens)


async def test_events_follow_the_snapshot_without_a_gap() -> None:
    backend = RecordingBackend()
    async with offering(backend) as stub:
        tell(backend, stored(0, 1, HIGH), stored(HIGH, 3))
        await asyncio.sleep(0)
        async with subscribed(stub) as gateway:
            assert set(gateway.blocks) == {1, -5, 3}
            assert gateway.blocks[3][0] == -5
            assert gateway.batches[-1].snapshot.blocks == 3
            tell(backend, stored(3, 4), BlocksRemoved([1]))
            await gateway.until(lambda: 4 in gateway.blocks)
            assert set(gateway.blocks) == {-5, 3, 4}
            tell(backend, BlocksCleared())
            await gateway.until(lambda: not gateway.blocks)
            tell(backend, stored(0, 9))
            await gateway.until(lambda: 9 in gateway.blocks)


async def test_a_large_cache_comes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "CHUNK_TOKENS", 3 * SIZE)
    backend = RecordingBackend()
    async with offering(backend) as stub:
        tell(backend, stored(0, *range(1, 12)), stored(0, 50))
        async with subscribed(stub) as gateway:
            assert set(gateway.blocks) == {*range(1, 12), 50}
            chunks = [batch.snapshot for batch in gateway.batches]
            assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
            assert {chunk.count for chunk in chunks} == {len(chunks)}
            tell(backend, stored(11, 12))
            await gateway.until(lambda: 12 in gateway.blocks)


async def test_blocks_that_need_more_than_their_tokens_are_left_out() -> None:
    backend = RecordingBackend()
    salted, adapted = 777, 888
    async with offering(backend) as stub:
        tell(backend, stored(salted, 1, 2), stored(0, 5))
        async with subscribed(stub) as gateway:
            assert set(gateway.blocks) == {5}
            of_adapter = replace(stored(adapted, 3), adapter=Adapter(1, "", "v"))
            tell(backend, stored(2, 6), of_adapter)
            batch = await _next_batch(gateway)
            assert not batch.events, "its number still comes"
            tell(backend, BlocksRemoved([6, 5, 1]))
            batch = await _next_batch(gateway)
            assert list(batch.events[0].removed.block_hashes) == [5]
            tell(backend, BlocksRemoved([2]))
            assert not (await _next_batch(gateway)).events


async def _next_batch(gateway: Gateway) -> Any:
    count = len(gateway.batches)
    await gateway.until(lambda: len(gateway.batches) > count)
    return gateway.batches[-1]


async def test_who_has_everything_resumes_and_others_start_anew() -> None:
    backend = RecordingBackend()
    async with offering(backend) as stub:
        tell(backend, stored(0, 1))
        async with subscribed(stub) as gateway:
            number, blocks = gateway.number, dict(gateway.blocks)
        async with subscribed(stub, number) as gateway:
            # The subscription must stand before the next event.
            await gateway.call.initial_metadata()
            gateway.number, gateway.blocks = number, blocks
            tell(backend, stored(1, 2))
            await gateway.until(lambda: 2 in gateway.blocks)
        for other in (number, number + 2, 1):
            asked = common_pb2.SubscribeKvEventsRequest(start_sequence_number=other)
            error = await refusal(stub.SubscribeKvEvents(asked))
            assert error.code() is grpc.StatusCode.OUT_OF_RANGE


def test_the_numbers_of_a_restarted_worker_are_new() -> None:
    # A difference of more steps than any worker makes in a second.
    assert first_number(1_001.0) > first_number(1_000.9) + 1_000_000


async def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_feed, "MOST_WAITING_BLOCKS", 1000)
    backend = RecordingBackend()
    async with offering(backend) as stub, subscribed(stub) as gateway:
        # Without a turn for the writer, so that all of it waits.
        tell(backend, *(stored(0, number) for number in range(1, 1200)))
        error = await refusal(gateway.call)
    assert error.code() is grpc.StatusCode.DATA_LOSS


async def test_subscribers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "MOST_SUBSCRIBERS", 2)
    asked = common_pb2.SubscribeKvEventsRequest()
    async with offering(RecordingBackend()) as stub, subscribed(stub):
        async with subscribed(stub):
            error = await refusal(stub.SubscribeKvEvents(asked))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "2 subscribers" in (error.details() or "")
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not await is_taken(stub.SubscribeKvEvents(asked)):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)


async def is_taken(call: Any) -> bool:
    """Whether a subscription begins: the end of another may be on its way."""
    try:
        return await call.read() is not grpc.aio.EOF
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    finally:
        call.cancel()


async def test_the_load_comes_with_changes_and_as_a_heartbeat() -> None:
    backend = RecordingBackend()
    async with offering(backend) as stub, subscribed(stub) as gateway:
        await gateway.until(lambda: gateway.loads)
        assert gateway.loads[0].running_requests == 0
        assert gateway.loads[0].max_running_requests == INFO.max_batch_size
        backend.stats_now = replace(IDLE, running_sequences=3, waiting_sequences=2, used_blocks=25)
        await gateway.until(lambda: gateway.loads[-1].running_requests == 3)
        assert gateway.loads[-1].waiting_requests == 2
        assert gateway.loads[-1].token_usage == 0.25
        known = len(gateway.loads)
        await gateway.until(lambda: len(gateway.loads) > known)
        samples = [load.sample for load in gateway.loads]
        assert samples == sorted(set(samples))


async def test_a_draining_worker_does_not_wait_for_subscribers() -> None:
    backend = RecordingBackend()
    settings = {"trtllm_service": True}

    async with (
        serving(backend, **settings) as engine,
        stub_of(engine.address) as stub,
        subscribed(stub) as gateway,
    ):
        async with asyncio.timeout(PATIENCE_SECONDS):
            await engine.service.drain()
        await engine.stop()
        error = await refusal(gateway.call)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
