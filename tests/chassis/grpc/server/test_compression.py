"""Which answers are compressed, and that compressing them holds up nobody."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from chassis.grpc.server.test_server import SERVICE, channel_to
from chassis.grpc.server.wire import Wire, message, wired
from trtmesh.chassis.grpc.compression_settings import CompressionSettings
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.grpc.server.compression import PIECE_BYTES
from trtmesh.chassis.http2.frames import ErrorCode, FrameType, rst_stream

MIN_BYTES = 16_384
ASKED, ACCEPTED, NEVER = (
    CompressionSettings(answers=answers) for answers in ("asked", "accepted", "never")
)
TEXT = b"again and again " * 3750
NOISE = random.Random(1).randbytes(20_000)
PLAIN = {"grpc-accept-encoding": "identity, deflate, gzip"}
GZIP = {**PLAIN, "grpc-encoding": "gzip"}
DEFLATE = {**PLAIN, "grpc-encoding": "deflate"}
GZIP_ALONE = {"grpc-accept-encoding": "identity,gzip"}


@asynccontextmanager
async def compressing(settings: CompressionSettings | None) -> AsyncIterator[Example]:
    example = Example(server=GrpcServer(MOST_BYTES, compression=settings))
    async with serving(example):
        yield example


async def answer(wire: Wire, body: bytes, said: dict[str, str]) -> tuple[bytes, dict[str, str]]:
    """The answer of Echo to a body that is not compressed, whatever the headers say."""
    wire.send(wire.call(1, changes=said), wire.data(1, body))
    return await wire.answer(1)


@pytest.mark.parametrize(
    ("settings", "said", "encoding"),
    [
        (ASKED, GZIP, "gzip"),
        (ASKED, DEFLATE, "deflate"),
        (ASKED, PLAIN, None),
        (ASKED, {"grpc-encoding": "gzip"}, None),
        (ASKED, {"grpc-encoding": "gzip", "grpc-accept-encoding": "identity"}, None),
        (ASKED, {**PLAIN, "grpc-encoding": "snappy"}, None),
        (ACCEPTED, PLAIN, "gzip"),
        (ACCEPTED, DEFLATE, "deflate"),
        (ACCEPTED, GZIP_ALONE, "gzip"),
        (ACCEPTED, {"grpc-accept-encoding": "identity,br"}, None),
        (ACCEPTED, {}, None),
        (NEVER, GZIP, None),
        (None, GZIP, None),
    ],
)
async def test_who_gets_large_answers_compressed(
    settings: CompressionSettings | None, said: dict[str, str], encoding: str | None
) -> None:
    async with compressing(settings) as example, wired(example) as wire:
        body, fields = await answer(wire, TEXT, said)
        assert fields.get("grpc-encoding") == encoding
        if encoding is None:
            assert body == message(TEXT)
            return
        assert body[0] == 1
        assert int.from_bytes(body[1:5]) == len(body) - 5 < len(TEXT) // 10
        window_bits = {"gzip": 31, "deflate": 15}[encoding]
        assert zlib.decompress(body[5:], window_bits) == TEXT


@pytest.mark.parametrize(
    "body", [TEXT[: MIN_BYTES - 1], NOISE, TEXT[:2_000] + NOISE], ids=["small", "noise", "mostly"]
)
async def test_what_is_not_worth_it_is_sent_as_it_is(body: bytes) -> None:
    async with compressing(ASKED) as example, wired(example) as wire:
        received, fields = await answer(wire, body, GZIP)
        assert received == message(body)
        assert fields["grpc-encoding"] == "gzip"


async def test_small_messages_are_sent_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trtmesh.chassis.grpc.server.compression.MIN_BYTES", 2000)
    async with compressing(ASKED) as example:
        for size, flag in ((1999, 0), (2000, 1)):
            async with wired(example) as wire:
                assert (await answer(wire, TEXT[:size], GZIP))[0][0] == flag


@pytest.mark.parametrize("encoding", ["snappy", "br"])
async def test_unknown_encoding_is_refused_by_name(encoding: str) -> None:
    async with compressing(ASKED) as example, wired(example) as wire:
        wire.send(wire.call(1, changes={"grpc-encoding": encoding}))
        wire.send(wire.compressed(1, b"whatever"))
        _, fields = await wire.answer(1)
        assert fields["grpc-status"] == "12"
        assert encoding in fields["grpc-message"]
        assert fields["grpc-accept-encoding"] == "identity, deflate, gzip"


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("method", ["Many", "Write"])
async def test_grpcio_reads_compressed_streams(compression: grpc.Compression, method: str) -> None:
    """Large and small messages of one stream."""
    async with compressing(ASKED) as example, channel_to(example) as channel:
        stream = channel.unary_stream(SERVICE + method)
        for count, size in ((20, 100_000), (500, 30)):
            call = stream(b"%d,%d" % (count, size), compression=compression)
            received = [each async for each in call]
            assert received == [bytes((number,)) * size for number in expected_numbers(count)]
        assert data_bytes(example) < 100_000


def expected_numbers(count: int) -> list[int]:
    return [number % 251 for number in range(count)]


def data_bytes(example: Example) -> int:
    """DATA sent on the only connection."""
    (connection,) = example.server.clients.open
    sent: int = connection.writer.data_bytes
    return sent


async def test_grpcio_gets_what_it_did_not_ask_for_as_it_is() -> None:
    """Though it accepts gzip in every call."""
    async with compressing(ASKED) as example, channel_to(example) as channel:
        assert await channel.unary_unary(SERVICE + "Echo")(TEXT) == TEXT
        assert data_bytes(example) > len(TEXT)
    async with compressing(ACCEPTED) as example, channel_to(example) as channel:
        assert await channel.unary_unary(SERVICE + "Echo")(TEXT) == TEXT
        assert data_bytes(example) < len(TEXT) // 10


def large_call(wire: Wire, stream: int = 1) -> bytes:
    """Asks for a message of MOST_BYTES zeros, compressed."""
    request = b"1,%d" % MOST_BYTES
    return wire.call(stream, "Many", changes=GZIP) + wire.data(stream, request)


class HeldPieces(ThreadPoolExecutor):
    """Compresses whole pieces of large messages when they may go on, and all else at once."""

    def __init__(self) -> None:
        super().__init__(1)
        self.held = list[Callable[[], object]]()
        self.may_go_on = False

    def submit(self, work: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        if self.may_go_on or not given or len(given[0]) < PIECE_BYTES:
            return super().submit(work, *given, **named)
        later = Future[Any]()
        self.held.append(lambda: later.set_result(work(*given, **named)))
        return later

    def go_on(self) -> None:
        self.may_go_on = True
        for each in self.held:
            each()


async def test_compressing_holds_up_nobody() -> None:
    """While one answer is compressed, another connection is served, and its smaller answer is compressed too."""
    async with compressing(ASKED) as example, wired(example) as wire, channel_to(example) as other:
        thread = example.server.clients.policy.compressor._thread = HeldPieces()
        wire.send(large_call(wire))
        large = asyncio.create_task(wire.answer(1))
        await until(lambda: len(thread.held) > 0)
        echo: Any = other.unary_unary(SERVICE + "Echo")
        assert await echo(b"on") == b"on"
        assert await echo(TEXT, compression=grpc.Compression.Gzip) == TEXT
        assert not large.done()
        assert unread(example) == MOST_BYTES
        thread.go_on()
        body, _ = await large
        assert zlib.decompress(body[5:], 31) == bytes(MOST_BYTES)
        assert unread(example) == 0


async def test_cancelled_call_is_not_compressed_further() -> None:
    async with compressing(ASKED) as example, wired(example) as wire:
        wire.send(large_call(wire))
        await until(lambda: unread(example) > 0)
        (connection,) = example.server.clients.open
        wire.send(rst_stream(1, ErrorCode.CANCEL))
        await until(lambda: not connection.has_calls)
        assert unread(example) == 0
        wire.send(wire.call(3, changes=GZIP), wire.data(3, TEXT))
        received = await wire.next(FrameType.DATA)
        assert received.stream_id == 3


async def test_unread_answers_end_the_call_that_compresses_most() -> None:
    async with compressing(ASKED) as example, wired(example) as wire:
        wire.send(wire.call(3, "Many"), wire.data(3, b"1,100000"))
        await until(lambda: 0 < unread(example) < 100_000)
        example.server.clients.answers.limit = MOST_BYTES
        wire.send(large_call(wire, stream=5))
        assert await wire.error() == (5, ErrorCode.ENHANCE_YOUR_CALM)
        await until(lambda: 0 < unread(example) < 100_000)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - in every pass of the loop
        await asyncio.sleep(0)


def unread(example: Example) -> int:
    held: int = example.server.clients.answers.held
    return held
