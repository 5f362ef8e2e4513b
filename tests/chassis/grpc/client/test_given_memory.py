"""Large messages that the client receives into given memory, with scripted frames."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from chassis.grpc.client.scripted_server import (
    HEAD,
    OK,
    PATIENCE_SECONDS,
    Peer,
    code_of,
    headers,
    method,
)
from chassis.grpc.server.conftest import MOST_BYTES, Example
from chassis.grpc.server.wire import Wire, message
from trtmesh.chassis.fair.messages import LARGE_BYTES
from trtmesh.chassis.grpc.client import ClientCall, Method, connected
from trtmesh.chassis.grpc.client.connection import BULK_WINDOW_SIZE
from trtmesh.chassis.grpc.messages import Message
from trtmesh.chassis.http2.frames import END_STREAM, PADDED, ErrorCode, FrameType, frame

RAW: Method[bytes, Message] = Method("/example.Service/Many", bytes, lambda message: message)


class Memory:
    """Gives memory and keeps it."""

    def __init__(self) -> None:
        self.given: list[bytearray] = []
        self.was_asked = asyncio.Event()

    def __call__(self, size: int) -> memoryview:
        self.was_asked.set()
        self.given.append(bytearray(size))
        return memoryview(self.given[-1])


@asynccontextmanager
async def receiving(peer: Peer) -> AsyncIterator[tuple[Wire, ClientCall[bytes, Message], Memory]]:
    """A call whose headers have arrived."""
    memory = Memory()
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS, memory=memory) as connection:
        wire = await peer.wire()
        call = connection.open(RAW)
        await wire.next(FrameType.HEADERS, stream=1)
        wire.send(headers(wire, 1, HEAD))
        yield wire, call, memory


def body_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("seed", range(5))
async def test_messages_arrive_whole_however_they_are_cut(peer: Peer, seed: int) -> None:
    dice = random.Random(seed)
    sizes = [0, 3, LARGE_BYTES - 1, LARGE_BYTES, 3 * LARGE_BYTES + 7, 5, 2**20, 11]
    dice.shuffle(sizes)
    bodies = [body_of(seed + at, size) for at, size in enumerate(sizes)]
    data = b"".join(map(message, bodies))
    async with receiving(peer) as (wire, call, memory):

        async def send() -> None:
            at = 0
            while at < len(data):
                size = dice.choice([1, 9, 14, 4096, 2**16, 2**20])
                padding = dice.choice([0, 0, 5])
                payload = data[at : at + min(size, 2**20 - 6)]
                at += len(payload)
                if padding:
                    payload = bytes((padding,)) + payload + bytes(padding)
                sent = frame(FrameType.DATA, PADDED if padding else 0, 1, payload)
                cut = dice.randrange(len(sent))
                wire.send(sent[:cut])
                await asyncio.sleep(0)
                wire.send(sent[cut:])
                await wire.writer.drain()
            wire.send(headers(wire, 1, OK, END_STREAM))

        sending = asyncio.create_task(send())
        found = [received async for received in call]
        await sending
        assert [bytes(each) for each in found] == bodies
        # A message that was complete at once needs no memory.
        large = [each for each in found if isinstance(each, memoryview)]
        assert len(large) == len(memory.given) > 0
        assert [each.obj for each in large] == memory.given
        assert all(len(each) >= LARGE_BYTES for each in large)


async def test_compressed_message_is_decompressed(peer: Peer) -> None:
    async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS, memory=Memory()) as connection:
        wire = await peer.wire()
        call = connection.open(RAW)
        await wire.next(FrameType.HEADERS, stream=1)
        wire.send(headers(wire, 1, HEAD | {"grpc-encoding": "deflate"}))
        body = body_of(1, 2 * LARGE_BYTES)
        data = message(zlib.compress(body), compressed=True)
        for at in range(0, len(data), 10_000):
            wire.send(frame(FrameType.DATA, 0, 1, data[at : at + 10_000]))
            await asyncio.sleep(0)
        wire.send(headers(wire, 1, OK, END_STREAM))
        assert [bytes(each) async for each in call] == [body]


async def test_message_over_the_limit_gets_no_memory(peer: Peer) -> None:
    async with receiving(peer) as (wire, call, memory):
        wire.send(frame(FrameType.DATA, 0, 1, b"\0" + (MOST_BYTES + 1).to_bytes(4)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert code_of(caught) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not memory.given


async def test_call_that_ends_inside_a_large_message_fails(peer: Peer) -> None:
    async with receiving(peer) as (wire, call, memory):
        wire.send(frame(FrameType.DATA, 0, 1, message(bytes(2**20))[:1000]))
        wire.send(headers(wire, 1, OK, END_STREAM))
        with pytest.raises(grpc.aio.AioRpcError, match="incomplete"):
            await call.read()
        assert len(memory.given) == 1


async def test_cancelled_call_takes_no_more_of_its_frame(peer: Peer) -> None:
    async with receiving(peer) as (wire, call, memory):
        body = message(b"\1" * 2**19)
        wire.send(frame(FrameType.DATA, 0, 1, body)[: 2**18])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await memory.was_asked.wait()
        call.cancel()
        assert await wire.error() == (1, ErrorCode.CANCEL)
        before = bytes(memory.given[0])
        wire.send(frame(FrameType.DATA, 0, 1, body)[2**18 :])
        wire.send(frame(FrameType.PING, 0, 0, bytes(8)))
        await wire.next(FrameType.PING)
        assert bytes(memory.given[0]) == before


async def test_unread_messages_hold_one_window(peer: Peer) -> None:
    async with receiving(peer) as (wire, _, memory):
        body = message(bytes(2**18 - 5))
        for _ in range(BULK_WINDOW_SIZE // 2**18):
            wire.send(frame(FrameType.DATA, 0, 1, body))
        wire.send(frame(FrameType.DATA, 0, 1, b"\0"))
        assert await wire.error() == (1, ErrorCode.FLOW_CONTROL_ERROR)
        assert sum(map(len, memory.given)) <= BULK_WINDOW_SIZE


async def test_real_servers_send_into_the_memory(example: Example) -> None:
    memory = Memory()
    async with connected(
        example.address, MOST_BYTES, PATIENCE_SECONDS, memory=memory
    ) as connection:
        call = connection.open(RAW)
        try:
            await call.write(b"7,1000000")
            call.half_close()
            found = [bytes(each) async for each in call]
        finally:
            call.cancel()
        assert found == [bytes((number,)) * 1_000_000 for number in range(7)]
        assert len(memory.given) == 7
        asking = connection.ask(method("Echo"), b"small", PATIENCE_SECONDS)
        assert await asking == b"small"
