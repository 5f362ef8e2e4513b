"""Measures what many workers, adapters and waiting items cost a running stream and the start of a request.

* `workers`: 64 streams at a 10 ms step, spread over 1 to 64 workers.
* `adapters`: one-token requests with a random adapter of 10, and of 10,000, all of them in the worker's memory.
* `waiting`: 64 streams at a 10 ms step beside nothing, and beside 10,000 items in the router's queue or the worker's.

What is compared is measured in turn, so that a ratio has little of the machine's drift. CPU µs a token, or a request,
of each process; the workers live in one process (`_simulated_fleet.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Annotated

from _doors import NATIVE
from _load import (
    CONNECTIONS,
    PROMPT,
    Figures,
    Found,
    ask,
    at_once,
    connections,
    microseconds,
    run_bench,
)
from _lora_placement import request_of
from _stack import Stack, routers, simulated_fleet
from burst import ENGINE
from trtmesh.chassis.grpc.client import Call, ClientConnection
from trtmesh.tools.fleet_replay.trace import Arrival
from trtmesh.v1 import router_pb2 as router_pb

STREAMS, ENDLESS = 64, 1_000_000
SETTLED_SECONDS, MEASURED_SECONDS = 1.0, 2.0
MOST_SETTLING = 60
WORKERS = (1, 8, 32, 64)
ADAPTERS = (10, 10_000)
WAITING, ITEMS_OF_A_REQUEST = 10_000, 1000
MANY_ITEMS = ("--admission-max-items", "30000", "--admission-max-queued-items", "30000")
ROOM = ("--simulated-limits-max-batch-size", str(STREAMS))


@contextmanager
def mesh(workers: int, flags: Sequence[str], router_flags: Sequence[str] = ()) -> Iterator[Stack]:
    """A router, a tokenizer and so many workers."""
    with (
        simulated_fleet(workers, *flags) as (engines, pid),
        routers(engines, *router_flags, tokenizer=True) as (router, tokenizer),
    ):
        pids = {"router": router["pid"], "tokenizer": tokenizer["pid"], "engines": pid}
        yield Stack(router["address"], pids)


class Streams:
    """Endless streams of a mesh."""

    def __init__(self, opened: Sequence[ClientConnection]) -> None:
        self._opened = opened
        self.tokens = 0
        self.begun = 0

    async def run(self, number: int) -> None:
        call = self._opened[number % len(self._opened)].open(NATIVE.method)
        await call.write(NATIVE.request(PROMPT, ENDLESS))
        call.half_close()
        first = True
        async for message in call:
            self.begun += first
            first = False
            # Tokens merge where anything lags.
            self.tokens += NATIVE.count(message)
        raise SystemExit("a stream ended")


@asynccontextmanager
async def streaming(started: Stack) -> AsyncIterator[Streams]:
    """Runs the streams until the block ends."""
    async with connections(started.address, CONNECTIONS) as opened:
        streams = Streams(opened)
        tasks = [asyncio.create_task(streams.run(number)) for number in range(STREAMS)]
        try:
            while streams.begun < STREAMS:  # noqa: ASYNC110 - a count sets no event
                await asyncio.sleep(SETTLED_SECONDS)
            await asyncio.sleep(SETTLED_SECONDS)
            yield streams
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def note_tokens(found: Found, started: Stack, streams: Streams) -> None:
    """CPU of a token while the streams run."""
    before, tokens = started.cpu_seconds(), streams.tokens
    await asyncio.sleep(MEASURED_SECONDS)
    found.note_cpu(microseconds(before, started.cpu_seconds(), streams.tokens - tokens))


async def measure_workers(runs: int) -> Figures:
    """A token of 64 streams by the number of workers, and its ratio to that of one worker."""
    found = {workers: Found() for workers in WORKERS}
    async with AsyncExitStack() as started:
        meshes = {
            workers: started.enter_context(
                mesh(workers, ENGINE, ("--placement-policy", "round_robin"))
            )
            for workers in WORKERS
        }
        for turn in range(runs + 1):
            for workers, each in meshes.items():
                async with streaming(each) as streams:
                    await note_tokens(found[workers] if turn else Found(), each, streams)
    return compared({str(workers): each for workers, each in found.items()})


async def measure_adapters(runs: int) -> Figures:
    """A lone request, and one of 32 at once, by the number of adapters."""
    counted = {number: {together: Found() for together in (1, 32)} for number in ADAPTERS}
    most = str(2 * max(ADAPTERS))
    flags = (
        *("--simulated-timing-step-ms", "0", "--simulated-adapters-slots", most),
        *("--simulated-adapters-host-adapters", most),
    )
    async with AsyncExitStack() as started:
        meshes = {number: started.enter_context(mesh(1, flags)) for number in ADAPTERS}
        opened = {
            number: await started.enter_async_context(connections(each.address, CONNECTIONS))
            for number, each in meshes.items()
        }
        for number in ADAPTERS:
            await serve_adapters(opened[number], [*range(number)], 64, weights=True)
        for turn in range(runs + 1):
            for number, each in meshes.items():
                for together, found in counted[number].items():
                    chosen = random.Random(turn).choices(range(number), k=600)
                    before = each.cpu_seconds()
                    began = time.perf_counter()
                    await serve_adapters(opened[number], chosen, together, weights=False)
                    if turn:
                        found.note("seconds_us", (time.perf_counter() - began) / 600 * 1e6)
                        found.note_cpu(microseconds(before, each.cpu_seconds(), 600))
    return {
        f"{together}_at_once": compared(
            {str(number): found[together] for number, found in counted.items()}
        )
        for together in (1, 32)
    }


async def serve_adapters(
    opened: Sequence[ClientConnection], adapters: Sequence[int], together: int, *, weights: bool
) -> None:
    """Asks for a token of each, so many at once."""
    left = iter(adapters)

    async def once(connection: ClientConnection) -> None:
        arrival = Arrival(0.0, 8, 1, 32, (), adapter=str(next(left)), adapter_rank=8)
        await ask(connection, NATIVE, request_of(arrival, weights=weights), 1)

    calls = [partial(once, opened[number % len(opened)]) for number in range(together)]
    await at_once(calls, len(adapters))


async def measure_waiting(runs: int) -> Figures:
    """A token of 64 streams beside nothing, and beside 10,000 items that wait in the router, or in the worker."""
    of_worker = ("--simulated-limits-max-queue-size", "20000")
    places = {
        "router": (ROOM, ("--admission-max-running-items", str(STREAMS))),
        "worker": ((*ROOM, *of_worker), ("--admission-max-running-items", "30000")),
    }
    figures = Figures()
    for name, (of_engine, of_router) in places.items():
        found = {"0": Found(), str(WAITING): Found()}
        with mesh(1, (*ENGINE, *of_engine), (*MANY_ITEMS, *of_router)) as started:
            for _ in range(runs):
                # Anew, since no sequence is endless.
                async with streaming(started) as streams:
                    await note_tokens(found["0"], started, streams)
                    async with queued(started, WAITING):
                        await note_tokens(found[str(WAITING)], started, streams)
        figures[name] = compared(found)
    return figures


@asynccontextmanager
async def queued(started: Stack, count: int) -> AsyncIterator[None]:
    """Has so many items wait until the block ends."""
    given = router_pb.GenerateRequest.FromString(NATIVE.request([1, 2, 3], 1, text=False))
    given.items.extend([given.items[0]] * (ITEMS_OF_A_REQUEST - 1))
    request = given.SerializeToString()
    async with connections(started.address, 1) as (connection,):
        before = await used(started)
        calls = [connection.open(NATIVE.method) for _ in range(count // ITEMS_OF_A_REQUEST)]
        for call in calls:
            await call.write(request)
            call.half_close()
        waits = [asyncio.create_task(_wait(call)) for call in calls]
        # Until each item stands in its queue, its router has more to do.
        for _ in range(MOST_SETTLING):
            await asyncio.sleep(SETTLED_SECONDS)
            if await used(started) < 1.3 * before:
                break
        yield
        for wait in waits:
            if wait.done():
                await wait
                raise SystemExit("an item did not wait")
            wait.cancel()
        await asyncio.wait(waits)
        for call in calls:
            call.cancel()


async def used(started: Stack) -> float:
    """CPU seconds of the services in a second."""
    before = sum(started.cpu_seconds().values())
    await asyncio.sleep(1)
    return sum(started.cpu_seconds().values()) - before


async def _wait(call: Call[bytes, bytes]) -> None:
    """Returns with the first token."""
    async for message in call:
        if NATIVE.begins(message):
            return


def compared(found: Mapping[str, Found]) -> Figures:
    """Medians, and their ratios to those of the first."""
    figures: Figures = {name: each.medians() for name, each in found.items()}
    first, *others = figures
    for name in others:
        figures[f"{name}_over_{first}"] = {
            kind: round(value / figures[first][kind], 3) for kind, value in figures[name].items()
        }
    return figures


PARTS = {
    "workers": measure_workers,
    "adapters": measure_adapters,
    "waiting": measure_waiting,
}


async def main(*, parts: Annotated[tuple[str, ...], PARTS] = tuple(PARTS), runs: int = 5) -> None:
    results = {}
    for part in parts:
        results[part] = await PARTS[part](runs)
        print(f"{part}: {json.dumps(results[part])}", file=sys.stderr)
    print(json.dumps(results))


if __name__ == "__main__":
    run_bench(main)
