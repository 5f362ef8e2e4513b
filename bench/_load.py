"""Streams over the mesh's own client, and the CPU that they cost.

Messages stay bytes and are parsed after the streams: the client shares the machine with the services.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from _doors import Door
from _stack import Stack
from trtmesh.chassis.grpc.client import ClientConnection, connected
from trtmesh.chassis.tls.client import ClientTls

PROMPT = "def fibonacci(n):\n    "
CONNECTIONS = 4
MAX_MESSAGE_BYTES, CONNECT_SECONDS = 2**26, 30.0
CLEANED_SECONDS = 0.1
"""What the services clean up belongs to the streams before."""

T = TypeVar("T")


@asynccontextmanager
async def connections(
    address: str, count: int, tls: ClientTls | None = None
) -> AsyncIterator[list[ClientConnection]]:
    peer = tls.peer_tls() if tls else None
    async with AsyncExitStack() as until_end:
        yield [
            await until_end.enter_async_context(
                connected(address, MAX_MESSAGE_BYTES, CONNECT_SECONDS, peer)
            )
            for _ in range(count)
        ]


@dataclass(slots=True)
class Stream:
    """The messages of a request, with the times of their arrival."""

    started: float = 0.0
    times: list[float] = field(default_factory=list)
    messages: list[bytes] = field(default_factory=list)

    async def receive(self, connection: ClientConnection, door: Door, request: bytes) -> None:
        call, self.started = connection.open(door.method), time.perf_counter()
        try:
            await call.write(request)
            call.half_close()
            async for message in call:
                self.times.append(time.perf_counter())
                self.messages.append(message)
        finally:
            call.cancel()

    def arrivals(self, door: Door) -> list[float]:
        """The times of messages with tokens."""
        pairs = zip(self.times, self.messages, strict=True)
        return [at for at, message in pairs if door.begins(message)]

    def first_seconds(self, door: Door) -> float:
        pairs = zip(self.times, self.messages, strict=True)
        return next(at for at, message in pairs if door.begins(message)) - self.started


async def ask(connection: ClientConnection, door: Door, request: bytes, tokens: int) -> float:
    """Sends a request; seconds to the first token. Raises SystemExit unless every token came."""
    stream = Stream()
    await stream.receive(connection, door, request)
    door.check(stream.messages, tokens)
    return stream.first_seconds(door)


async def at_once(calls: Sequence[Callable[[], Awaitable[T]]], count: int) -> tuple[float, list[T]]:
    """Has so many calls made, by as many at once as there are `calls`. Returns the seconds, and what each gave."""
    left, found = iter(range(count)), list[T]()

    async def client(call: Callable[[], Awaitable[T]]) -> None:
        for _ in left:
            found.append(await call())

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(client(call))
    return time.perf_counter() - began, found


@dataclass(frozen=True, slots=True)
class Together:
    """Streams that began together, and what they cost."""

    door: Door
    streams: Sequence[Stream]
    tokens: int
    seconds: float
    cpu_us: Mapping[str, float]
    """Of a token, by service."""
    client_us: float

    @property
    def services_us(self) -> float:
        return sum(self.cpu_us.values())

    def first_ms(self) -> list[float]:
        return [stream.first_seconds(self.door) * 1e3 for stream in self.streams]

    def gaps_ms(self) -> list[float]:
        return gaps_ms(stream.arrivals(self.door) for stream in self.streams)


def gaps_ms(arrivals: Iterable[Sequence[float]]) -> list[float]:
    """Between the messages of each stream."""
    return [(later - earlier) * 1e3 for times in arrivals for earlier, later in pairwise(times)]


async def together(
    mesh: Stack,
    door: Door,
    count: int,
    tokens: int,
    tls: ClientTls | None = None,
    prompt: str = PROMPT,
    meanwhile: Callable[[Sequence[Stream]], Awaitable[object]] | None = None,
) -> Together:
    """Sends `count` equal requests at once over one connection. Raises SystemExit unless every token came."""
    streams, request = [Stream() for _ in range(count)], door.request(prompt, tokens)
    async with connections(mesh.address, 1, tls) as (connection,):
        before, client = mesh.cpu_seconds(), sum(os.times()[:2])
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(stream.receive(connection, door, request))
            if meanwhile:
                await meanwhile(streams)
        seconds = time.perf_counter() - started
        client = sum(os.times()[:2]) - client
        await asyncio.sleep(CLEANED_SECONDS)
        used = microseconds(before, mesh.cpu_seconds(), count * tokens)
    for stream in streams:
        door.check(stream.messages, tokens)
    return Together(door, streams, count * tokens, seconds, used, client / count / tokens * 1e6)


def microseconds(
    before: Mapping[str, float], after: Mapping[str, float], count: float
) -> dict[str, float]:
    """CPU of each of `count` tokens or requests, by service."""
    return {name: (after[name] - before[name]) / count * 1e6 for name in after}


@dataclass(frozen=True, slots=True)
class Side:
    """A way to ask, by as many calls as may be made at once, each for the seconds to its first token, and the CPU time
    of what serves them so far."""

    calls: Sequence[Callable[[], Awaitable[float]]]
    cpu_seconds: Callable[[], float]

    async def turn(self, count: int, tokens: int = 1) -> Mapping[str, float]:
        """CPU of a token, the requests that are served in a second, and the median time to their first tokens."""
        before = self.cpu_seconds()
        seconds, firsts = await at_once(self.calls, count)
        await asyncio.sleep(2 * CLEANED_SECONDS)
        used = (self.cpu_seconds() - before) * 1e6 / (count * tokens)
        ttft = statistics.median(firsts) * 1e3
        return {"cpu_us": used, "per_second": count / seconds, "ttft_p50_ms": ttft}
