"""Drawn frames into both sides of a connection: each goes on, or ends in order, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import grpc
import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from conformance.broken_frames import broken
from conformance.fuzz_frames import FRAMES, PATHS, REQUEST, RESPONSE, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client import ClientConnection, Method, connected
from trtmesh.chassis.http2.frames import ACK, PREFACE, FrameType, frame
from trtmesh.chassis.http2.frames import settings as settings_frame

EXAMPLES = 150
PATIENCE_SECONDS = 120.0
QUESTION = b"fuzzing?"
PING = frame(FrameType.PING, 0, 0, QUESTION)
PONG = frame(FrameType.PING, ACK, 0, QUESTION)
GOAWAY = bytes((FrameType.GOAWAY, 0, 0, 0, 0, 0))
"""Type, flags and stream of a GOAWAY frame."""


class Duty(Enum):
    """What the other side owes."""

    NOTHING = auto()
    """It may wait for the rest of a frame."""
    ANSWER_OR_END = auto()
    END = auto()


Trial = Callable[[bytes, Duty], Coroutine[Any, Any, None]]
"""Sends bytes to one side."""


def fuzz(runner: asyncio.Runner, trial: Trial, greeting: bytes, seconds: float) -> None:
    """Tries whole frames and cut or changed ones after a greeting: the same few, or new ones for `seconds`."""

    @given(FRAMES, st.none() | st.integers(0, 2**16), st.integers(0, 255))
    @settings(max_examples=EXAMPLES, derandomize=not seconds)
    def run(frames: list[bytes], at: int | None, byte: int) -> None:
        sent = bytearray(_to_the_first_broken(greeting, frames))
        if at is not None:
            sent[at % len(sent)] = byte
        whole = greeting + bytes(sent)
        runner.run(trial(whole, _duty_of(whole) if at is None else Duty.NOTHING))

    end = time.monotonic() + seconds
    run()
    while time.monotonic() < end:
        run()


def _duty_of(frames: bytes) -> Duty:
    return Duty.END if broken(frames) else Duty.ANSWER_OR_END


def _to_the_first_broken(greeting: bytes, frames: list[bytes]) -> bytes:
    """Ends the frames where the connection must end: a second reason would hide that the first was missed."""
    sent = b""
    for each in frames:
        sent += each
        if broken(greeting + sent):
            break
    return sent


class Complaints(logging.Handler):
    """Errors in the log or the event loop."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


async def _settled(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not done():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)


async def _until_answer_or_end(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, duty: Duty
) -> None:
    """Whole frames are followed by an answered PING, or the connection ends by GOAWAY or a reset, as it must after
    broken ones. Others may hold the other side until this side ends."""
    said = b""
    with suppress(ConnectionError):
        if duty is Duty.NOTHING:
            writer.write_eof()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while piece := await reader.read(2**16):
                said += piece
                if PONG in said:
                    assert duty is not Duty.END, "broken frames were taken"
                    return
        assert GOAWAY in said or duty is Duty.NOTHING, said[-100:]


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    """Fails the test that leaves any."""
    complaints, log = Complaints(), logging.getLogger()
    log.addHandler(complaints)
    yield complaints
    log.removeHandler(complaints)
    assert not complaints.found


@pytest.fixture
def runner(complaints: Complaints) -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_exception_handler(lambda _, context: complaints.found.append(str(context)))
        yield runner
        gc.collect()


def test_server(runner: asyncio.Runner, fuzz_seconds: float) -> None:
    example = Example()
    served = serving(example)
    runner.run(served.__aenter__())
    server = example.server

    async def trial(sent: bytes, duty: Duty) -> None:
        reader, writer = await asyncio.open_connection(*example.host_and_port)
        try:
            writer.write(sent + PING)
            await _until_answer_or_end(reader, writer, duty)
            assert server.clients.budget.held <= len(sent)
        finally:
            writer.transport.abort()
        await _settled(lambda: not server.clients.open and len(asyncio.all_tasks()) == 1)
        assert server.clients.budget.held == 0

    try:
        calls = opened(REQUEST, (PATHS[0], PATHS[1], PATHS[2]))
        fuzz(runner, trial, PREFACE + settings_frame({}) + calls, fuzz_seconds)
    finally:
        runner.run(served.__aexit__(None, None, None))


def test_client(runner: asyncio.Runner, fuzz_seconds: float) -> None:
    async def trial(sent: bytes, duty: Duty) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(settings_frame({}))
            await _until(reader, b"/example.Service/C")
            writer.write(sent + PING)
            try:
                await _until_answer_or_end(reader, writer, duty)
            except (AssertionError, TimeoutError) as error:
                served.set_exception(error)
            else:
                served.set_result(None)
            finally:
                writer.transport.abort()

        served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server, asyncio.timeout(PATIENCE_SECONDS):
            host, port = server.sockets[0].getsockname()
            async with connected(f"{host}:{port}", MOST_BYTES, PATIENCE_SECONDS) as connection:
                await asyncio.gather(*(_call(connection, name) for name in "ABC"))
                await served
                assert connection._budget.held == 0
                assert not connection._streams
        await _settled(lambda: len(asyncio.all_tasks()) == 1)

    fuzz(runner, trial, b"", fuzz_seconds / 2)
    fuzz(runner, trial, opened(RESPONSE), fuzz_seconds / 2)


async def _call(connection: ClientConnection, name: str) -> None:
    """A call to its end, whatever the server says."""
    call = connection.open(Method(f"/example.Service/{name}", bytes, bytes))
    try:
        with suppress(grpc.aio.AioRpcError, Unavailable):
            await call.write(b"x")
            while await call.read() is not None:
                pass
    finally:
        call.cancel()


async def _until(reader: asyncio.StreamReader, words: bytes) -> None:
    said = b""
    while words not in said:
        piece = await reader.read(2**16)
        assert piece
        said += piece
