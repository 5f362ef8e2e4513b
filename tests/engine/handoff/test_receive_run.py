"""A receiver against senders that break the protocol, vanish or fall silent. Some senders are scripts."""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engine.handoff.pairs import PROMPT, SLOW, Pair, lease, oracle, pair, release, renew, reserve
from engine_streams import MESSAGE_BYTES, eventually, submit
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.rpc import ServedContext
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.engine.backend import Reserved
from trtmesh.engine.handoff.identity import content_of
from trtmesh.engine.handoff.receive_machine import ReceiverPhase
from trtmesh.engine.handoff.transports.block_copy import batches
from trtmesh.engine.handoff.transports.transport import ShardCopy
from trtmesh.engine.kv_memory import HostMemory
from trtmesh.v1 import generation_pb2 as gpb
from trtmesh.v1 import kv_transfer_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2_grpc

Script = Callable[[ServedContext], Awaitable[None]]

BLOCKS, LAYERS = 4, 4
NIXL = pb.KV_TRANSPORT_NIXL


class ScriptedSender(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """Answers fetches with a script."""

    def __init__(self, script: Script) -> None:
        self._script = script

    # A coroutine, like the real one.
    async def Fetch(self, request_iterator: object, context: ServedContext) -> None:  # type: ignore[override]
        opening = await context.read()
        assert isinstance(opening, pb.FetchRequest)
        assert opening.open.blocks.lease_id
        await self._script(context)


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """Serves the script; yields the address."""
    server = GrpcServer(MESSAGE_BYTES)
    kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(ScriptedSender(script), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=0)


async def attached_to(both: Pair, address: str, **fields: Any) -> str:
    """Attaches a reservation to another address with the descriptor of a real sender; returns the lease."""
    sender_lease, receiver_lease = lease(), lease()
    await both.reserve(receiver_lease, **fields)
    descriptor = await both.prefill(1, sender_lease)
    await both.sender.stream.send(release(sender_lease))
    await both.sender.stream.end(1)
    descriptor.address = address
    await both.attach(receiver_lease, descriptor)
    return receiver_lease


def part(number: int, **fields: Any) -> pb.FetchResponse:
    values = {"blocks": BLOCKS, "layers": LAYERS} | fields
    return pb.FetchResponse(part=pb.KvPart(part=number, **values))


def chunk(size: int) -> pb.FetchResponse:
    return pb.FetchResponse(chunk=pb.KvChunk(data=bytes(size)))


def mark(parts: int, tokens: int = len(PROMPT)) -> pb.FetchResponse:
    commit = pb.KvCommitMark(
        parts=parts, computed_tokens=tokens, token_digest=content_of(0, PROMPT).digest
    )
    return pb.FetchResponse(commit=commit)


def block_bytes(both: Pair) -> int:
    (shard,) = both.receiver.handoffs.own.memory.shards
    return shard.block_bytes


Messages = Callable[[int], Sequence[pb.FetchResponse]]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (lambda _: [], "ended the fetch"),
        (lambda _: [mark(1)], "did not announce"),
        (lambda _: [part(1)], "broke the handoff protocol"),
        (
            lambda _: [part(0, blocks=2), part(1, first_block_position=2, blocks=2)],
            "before the end",
        ),
        (lambda size: [part(0), chunk(4 * size), chunk(1)], "more bytes"),
        (lambda _: [chunk(1)], "more bytes"),
        (lambda _: [part(0, blocks=BLOCKS + 1)], "descriptor lacks"),
        (lambda _: [part(0, layers=LAYERS + 1)], "descriptor lacks"),
        (lambda size: [part(0, checksum=7), chunk(4 * size)], "damaged"),
        (lambda size: [part(0), chunk(4 * size), mark(2)], "broke the handoff protocol"),
        (lambda size: [part(0), chunk(4 * size), mark(1, tokens=1000)], "did not announce"),
        (lambda size: [part(0, layers=2), chunk(2 * size), mark(1)], "did not announce"),
        (lambda size: [part(0, layers=2), chunk(2 * size), part(1, layers=2)], "twice"),
        (
            lambda size: [
                *(part(0, blocks=2), chunk(2 * size)),
                *(part(1, first_block_position=1, blocks=3), chunk(3 * size)),
            ],
            "twice",
        ),
        (lambda _: [pb.FetchResponse(confirmed=pb.FetchConfirmed())], "broke the handoff"),
        (lambda _: [pb.FetchResponse()], "unknown message"),
    ],
)
async def test_broken_protocol_fails_the_lease(messages: Messages, words: str) -> None:
    async with pair(SLOW) as both:
        size = block_bytes(both)

        async def script(context: ServedContext) -> None:
            for message in messages(size):
                await context.write(message)
            if "ended" not in words:
                await asyncio.Event().wait()

        async with scripted(script) as address:
            receiver_lease = await attached_to(both, address)
            error = await both.receiver.failed(receiver_lease)
            assert error.reason == "HANDOFF_FAILED"
            assert words in error.message
            await both.receiver.settled()


async def test_checksum_of_a_part_is_that_of_its_bytes() -> None:
    async with pair(SLOW) as both:
        size = 4 * block_bytes(both)
        checksum = zlib.crc32(bytes(size))

        async def script(context: ServedContext) -> None:
            for message in (part(0, checksum=checksum), chunk(size), mark(1)):
                await context.write(message)
            request = await context.read()
            assert isinstance(request, pb.FetchRequest)
            assert request.HasField("received")

        async with scripted(script) as address:
            receiver_lease = await attached_to(both, address)
            received = both.receiver.handoffs.received
            await eventually(lambda: received.all()[0]._lease.phase is ReceiverPhase.COMPLETE)
            await both.receiver.stream.send(release(receiver_lease))
            await both.receiver.settled()


@pytest.mark.parametrize("begun", [[], [part(0)], [part(0), chunk(5)]])
async def test_silent_sender_ends_with_the_lease(begun: list[pb.FetchResponse]) -> None:
    async def script(context: ServedContext) -> None:
        for message in begun:
            await context.write(message)
        await asyncio.Event().wait()

    async with pair(SLOW) as both, scripted(script) as address:
        receiver_lease = await attached_to(both, address)
        await both.receiver.stream.send(renew(receiver_lease, expires_in_ms=20))
        assert "renewed" in (await both.receiver.failed(receiver_lease)).message
        await both.receiver.settled()
        assert both.receiver.received.expired == 1


async def test_sender_that_accepts_and_never_speaks_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
        await assert_given_up(address)


async def assert_given_up(address: str) -> None:
    async with pair(SLOW, handoff={"dial_seconds": 0.1}) as both:
        receiver_lease = await attached_to(both, address)
        assert "SETTINGS" in (await both.receiver.failed(receiver_lease)).message
        await both.receiver.settled()


async def test_absent_sender_is_reported() -> None:
    async with pair(SLOW) as both:
        receiver_lease = await attached_to(both, "127.0.0.1:1")
        assert "cannot connect" in (await both.receiver.failed(receiver_lease)).message


async def test_end_of_the_senders_process_fails_the_waiting_sequence() -> None:
    async with pair(SLOW) as both:
        _, receiver_lease = await both.attached()
        await both.receiver.stream.send(
            submit(1, 20, prompt=(*PROMPT, 5), emitted_tokens=1, receiver_lease_id=receiver_lease)
        )
        await both.sender.engine.stop()
        end = (await both.receiver.stream.end(1)).end
        assert end
        assert end.error.reason == "HANDOFF_FAILED"
        assert end.reason == gpb.FINISH_REASON_ERROR


class Network:
    """Carries bytes between receivers and a sender until it falls silent."""

    def __init__(self, target: str) -> None:
        self._host, self._port = target.split(":")
        self._open = asyncio.Event()
        self._open.set()

    @asynccontextmanager
    async def carrying(self) -> AsyncIterator[str]:
        """Yields the address for receivers."""
        async with asyncio.TaskGroup() as pumps:
            server = await asyncio.start_server(
                lambda *ends: pumps.create_task(self._connect(*ends)), "127.0.0.1", 0
            )
            async with server:
                yield "{}:{}".format(*server.sockets[0].getsockname())

    def fall_silent(self) -> None:
        self._open.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        try:
            await until_first_ends(self._pump(reader, back), self._pump(there, writer))
        finally:
            writer.close()
            back.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            await self._open.wait()
            writer.write(data)


async def test_silent_network_ends_with_the_leases_of_both_sides() -> None:
    async with pair({"step_ms": 100, "prefill_tokens_per_step": 1}) as both:
        network = Network(both.sender.engine.address)
        async with network.carrying() as address:
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            descriptor = await both.prefill(1, lease())
            descriptor.address = address
            await both.attach(receiver_lease, descriptor)
            await eventually(lambda: both.sender.fetches(descriptor.lease_id))
            network.fall_silent()
            await both.receiver.stream.send(renew(receiver_lease, expires_in_ms=20))
            await both.sender.stream.send(renew(descriptor.lease_id, expires_in_ms=20))
            await both.receiver.failed(receiver_lease)
            await both.sender.stream.end(1)
            await eventually(lambda: both.sender.sent.expired)
            await both.receiver.settled()
            assert both.receiver.received.expired == 1


class GatedSource:
    """Copies a sender's memory once the gate is open; a read cannot be aborted."""

    state = b"receiver"

    def __init__(self, transport: GatedTransport) -> None:
        self._transport = transport

    async def read(self, copies: Sequence[ShardCopy]) -> None:
        self._transport.begun += 1
        await self._transport.gate.wait()
        rows = [
            [memory.rows for memory in self._transport.memories(one)]
            for one in (self._transport.sender, self._transport.receiver)
        ]
        for batch in batches(copies, *rows):
            for piece in batch:
                piece.copy()
        self._transport.ended += 1

    async def close(self) -> None:
        await self._transport.gate.wait()


class GatedTransport:
    """A one-sided transport between the memories of two workers of this process."""

    kind = NIXL

    def __init__(self, both: Pair) -> None:
        self.sender, self.receiver = (
            each.handoffs.own.memory for each in (both.sender, both.receiver)
        )
        self.gate = asyncio.Event()
        self.begun = self.ended = 0
        for each in (both.sender, both.receiver):
            transports: Any = each.handoffs.own.transports
            transports.clear()
            transports[NIXL] = self

    @staticmethod
    def memories(memory: Any) -> list[HostMemory]:
        return [memory.memory(number) for number in range(len(memory.shards))]

    def offer(self) -> bytes:
        return b"sender"

    async def open(self, offer: bytes) -> GatedSource:
        assert offer == b"sender"
        return GatedSource(self)

    async def close(self) -> None:
        pass


class TestOneSidedReads:
    async def test_confirmed_reads_are_used(self) -> None:
        expected = await oracle()
        async with pair() as both:
            GatedTransport(both).gate.set()
            assert await both.hand_over() == expected
            await both.settled()
            assert both.sender.sent.consumed == both.receiver.received.consumed == 1

    @pytest.mark.parametrize(
        ("sender", "receiver"),
        [
            ({}, {}),
            ({"prefill_tokens_per_step": 7}, {}),
            ({}, {"shards": 2}),
            ({"tokens_per_block": 16}, {"tokens_per_block": 32, "shards": 2}),
        ],
    )
    async def test_checksums_of_reads_fit(
        self, sender: dict[str, Any], receiver: dict[str, Any]
    ) -> None:
        async with pair(sender, receiver, {"checksums": "all"}) as both:
            GatedTransport(both).gate.set()
            await both.hand_over()

    async def test_read_with_another_checksum_is_damaged(self) -> None:
        async with pair(handoff={"checksums": "all"}) as both:
            gated = GatedTransport(both)
            _, receiver_lease = await both.attached()
            await both.sender.stream.end(1)
            await eventually(lambda: gated.begun)
            (block, *_) = both.sender.handoffs.sent.all()[0].blocks
            memory = gated.memories(gated.sender)[0]
            memory.rows[block] ^= 1
            gated.gate.set()
            assert "damaged" in (await both.receiver.failed(receiver_lease)).message

    async def test_blocks_stay_in_quarantine_until_their_reads_end(self) -> None:
        handoff = {"max_quarantined_fraction": 0.25}
        async with pair(receiver={"total_blocks": 12}, handoff=handoff) as both:
            gated = GatedTransport(both)
            _, receiver_lease = await both.attached()
            await both.sender.stream.end(1)
            await eventually(lambda: gated.begun)
            await both.receiver.stream.send(release(receiver_lease))
            await eventually(lambda: both.receiver.received.released == 1)
            load = both.receiver.load
            assert load.quarantined_blocks == load.used_blocks == BLOCKS
            assert load.received_handoffs.held == 0
            refused = lease()
            await both.receiver.stream.send(reserve(refused, 30))
            await both.receiver.stream.until(lambda: both.receiver.stream.blocks_reserved)
            assert both.receiver.stream.blocks_reserved.pop().error.reason == "QUEUE_FULL"
            gated.gate.set()
            await both.settled()
            last = lease()
            await both.reserve(last)
            await both.receiver.stream.send(release(last))

    async def test_defect_leaves_blocks_in_quarantine_until_their_reads_end(self) -> None:
        async with pair() as both:
            gated = GatedTransport(both)
            _, receiver_lease = await both.attached()
            await both.sender.stream.end(1)
            await eventually(lambda: gated.begun)
            # A backend must not answer a reservation twice.
            both.receiver.handoffs.take(Reserved(receiver_lease))
            load = both.receiver.load
            gated.gate.set()
            assert load.received_handoffs.released == 1
            assert load.quarantined_blocks == load.used_blocks == BLOCKS

    async def test_submit_with_a_lease_in_quarantine_fails(self) -> None:
        async with pair() as both:
            gated = GatedTransport(both)
            _, receiver_lease = await both.attached()
            await eventually(lambda: gated.begun)
            await both.receiver.stream.send(
                release(receiver_lease),
                submit(
                    1, 20, prompt=(*PROMPT, 5), emitted_tokens=1, receiver_lease_id=receiver_lease
                ),
            )
            end = (await both.receiver.stream.end(1)).end
            assert end
            assert end.error.reason == "HANDOFF_FAILED"
            gated.gate.set()

    async def test_reads_after_the_senders_lease_are_not_used(self) -> None:
        async with pair() as both:
            gated = GatedTransport(both)
            sender_lease, receiver_lease = await both.attached()
            await both.sender.stream.end(1)
            await eventually(lambda: gated.begun)
            await both.sender.stream.send(release(sender_lease))
            await both.sender.settled()
            gated.gate.set()
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"

    async def test_expired_lease_keeps_its_blocks_from_other_sequences(self) -> None:
        async with pair(receiver={"total_blocks": 5}) as both:
            gated = GatedTransport(both)
            receiver_lease = lease()
            await both.reserve(receiver_lease)
            await both.attach(receiver_lease, await both.prefill(1, lease()))
            await both.sender.stream.end(1)
            await eventually(lambda: gated.begun)
            await both.receiver.stream.send(renew(receiver_lease, expires_in_ms=20))
            assert (await both.receiver.failed(receiver_lease)).reason == "HANDOFF_FAILED"
            assert not gated.ended
            await both.receiver.stream.send(submit(2, 8, prompt=PROMPT))
            await eventually(lambda: both.receiver.backend.stats().waiting_sequences)
            gated.gate.set()
            assert len((await both.receiver.stream.end(2)).token_ids) == 8
