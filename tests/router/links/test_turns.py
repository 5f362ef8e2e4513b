"""Turns to connect, and a router before more workers than a busy machine can greet at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from router.scripted import (
    Context,
    ScriptedEngine,
    eventually,
    serving_engine,
    serving_router,
)
from trtmesh.router.links.replica import MOST_DOUBTFUL, MOST_TURNS, ConnectTurns

WORKERS = 64

ENDLESS_SECONDS = 3600.0

SLICES, SLICE_SECONDS = 4, 0.01
"""Work of a greeting. 64 at once take 2.56 s each, more than the deadline; so do 32, and 24 do not."""


class Greeter:
    """Replicas of a test: each takes a turn, and keeps it until told."""

    def __init__(self, seconds: float = ENDLESS_SECONDS) -> None:
        self.seconds = seconds
        self.turns = ConnectTurns()
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, *names: str, is_doubtful: bool = False) -> None:
        for name in names:
            self._ends[name] = asyncio.Event()
            self._tasks[name] = asyncio.create_task(self._take(name, is_doubtful=is_doubtful))
        await _settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._ends[name].set()
        await _settle()

    async def leave(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        await _settle()

    async def _take(self, name: str, *, is_doubtful: bool) -> None:
        async with self.turns.turn(self.seconds, is_doubtful=is_doubtful) as turn:
            self.begun.append(name)
            await self._ends[name].wait()
            turn.end()
            turn.end()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def _names(kind: str, count: int) -> list[str]:
    return [f"{kind}{number}" for number in range(count)]


async def test_turns_are_limited_and_in_order() -> None:
    on, names = Greeter(), _names("a", MOST_TURNS + 3)
    await on.ask(*names)
    assert on.begun == names[:MOST_TURNS]
    await on.end("a7", "a3")
    assert on.begun == names[: MOST_TURNS + 2]


async def test_doubtful_replicas_leave_room_for_others() -> None:
    on, doubtful, sound = Greeter(), _names("d", MOST_TURNS), _names("s", MOST_TURNS)
    await on.ask(*doubtful, is_doubtful=True)
    assert on.begun == doubtful[:MOST_DOUBTFUL]
    await on.ask(*sound)
    room = MOST_TURNS - MOST_DOUBTFUL
    assert on.begun[MOST_DOUBTFUL:] == sound[:room]
    # Others wait: they come first.
    await on.end("d0")
    assert on.begun[-1] == sound[room]
    await on.end(*sound[: room + 1])
    await on.leave(*sound[room + 1 :])
    assert on.begun[-1] == doubtful[MOST_DOUBTFUL]


async def test_replica_that_leaves_gives_its_turn_back() -> None:
    on, names = Greeter(), _names("a", MOST_TURNS + 2)
    await on.ask(*names)
    # One waits, one was greeted.
    await on.leave(names[MOST_TURNS], "a0")
    assert on.begun[MOST_TURNS:] == names[MOST_TURNS + 1 :]
    await on.leave(*names)
    await on.ask(*(again := _names("b", MOST_TURNS)))
    assert on.begun[-MOST_TURNS:] == again


async def test_turn_is_over_before_its_replica_is() -> None:
    on, silent, later = Greeter(seconds=0.02), _names("s", MOST_TURNS), _names("l", MOST_TURNS)
    await on.ask(*silent, *later)
    assert on.begun == silent
    await eventually(lambda: on.begun == [*silent, *later])
    # Each turn was given back once.
    await on.leave(*silent, *later)
    on.seconds = ENDLESS_SECONDS
    await on.ask(*(again := _names("a", MOST_TURNS + 1)))
    assert on.begun[2 * MOST_TURNS :] == again[:MOST_TURNS]


class BusyMachine:
    """Shares its time between all greetings under way."""

    def __init__(self) -> None:
        self._open = 0

    async def greet(self) -> None:
        self._open += 1
        try:
            for _ in range(SLICES):
                await asyncio.sleep(SLICE_SECONDS * self._open)
        finally:
            self._open -= 1

    @asynccontextmanager
    async def before(self, address: str) -> AsyncIterator[str]:
        """Yields the address of a worker on the machine: bytes pass once the greeting had its time."""
        host, port = address.rsplit(":", 1)

        serving = set[asyncio.Task[None] | None]()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            serving.add(asyncio.current_task())
            with suppress(OSError):
                try:
                    await self._pass(reader, writer, host, int(port))
                finally:
                    writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in filter(None, serving):
                task.cancel()
            await asyncio.gather(*filter(None, serving), return_exceptions=True)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        await self.greet()
        worker_reader, worker_writer = await asyncio.open_connection(host, port)
        down = asyncio.create_task(_copy(reader, worker_writer))
        try:
            await _copy(worker_reader, writer)
        finally:
            down.cancel()
            worker_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()


async def test_busy_machine_of_many_workers_greets_all() -> None:
    machine = BusyMachine()
    async with AsyncExitStack() as stack:
        addresses = []
        for number in range(WORKERS):
            engine = ScriptedEngine(worker=f"w{number}")
            address = await stack.enter_async_context(serving_engine(engine))
            addresses.append(await stack.enter_async_context(machine.before(address)))
        client = await stack.enter_async_context(serving_router(addresses))
        await eventually(lambda: client.gauge("ready_workers") == WORKERS)


async def test_workers_are_found_and_found_again_among_silent_addresses() -> None:
    """The kernel accepts a connection, and no process answers."""
    async with AsyncExitStack() as stack:
        silent = []
        for _ in range(2 * MOST_TURNS):
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            silent.append(f"127.0.0.1:{listening.getsockname()[1]}")
        engines = [ScriptedEngine(worker=f"w{number}") for number in range(4)]
        live = [await stack.enter_async_context(serving_engine(engine)) for engine in engines]
        client = await stack.enter_async_context(serving_router([*silent, *live]))
        await eventually(lambda: client.gauge("ready_workers") == len(live))
        for engine in engines:
            await engine.hang_up()
        await eventually(lambda: all(len(engine.hellos) == 2 for engine in engines))
        await eventually(lambda: client.gauge("ready_workers") == len(live))


class MuteEngine(ScriptedEngine):
    """Accepts a stream, and never says Welcome."""

    # mypy-protobuf types generators only.
    async def Connect(self, request_iterator: object, context: Context) -> None:  # type: ignore[override]
        await asyncio.Event().wait()


async def test_workers_are_found_among_many_that_never_say_welcome() -> None:
    """Their streams may stay silent for an hour, and there are more of them than turns."""
    silence = {"silence_seconds": ENDLESS_SECONDS / 10}
    async with AsyncExitStack() as stack:
        mute = [
            await stack.enter_async_context(serving_engine(MuteEngine(worker=f"m{number}")))
            for number in range(2 * MOST_TURNS)
        ]
        engines = [ScriptedEngine(worker=f"w{number}") for number in range(4)]
        live = [await stack.enter_async_context(serving_engine(engine)) for engine in engines]
        client = await stack.enter_async_context(serving_router([*mute, *live], deadlines=silence))
        await eventually(lambda: client.gauge("ready_workers") == len(live))
