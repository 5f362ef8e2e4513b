"""Measures what many workers, adapters and waiting items cost a running stream and the start of a request.

* `workers`: 64 streams at a 10 ms step, spread over 1 to 64 workers.
* `adapters`: one-token requests with a random adapter of 10, and of 10,000, all of them in the worker's memory.
* `waiting`: 64 streams at a 10 ms step beside nothing, and beside 10,000 items in the router's queue or the worker's.

What is compared is measured in turn, so that a ratio has little of the machine's drift. CPU µs a token, or a request,
of each process; the workers live in one process (`_simulated_fleet.py`).
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvloop
from _doors import DOORS
from _lora_placement import request_of
from _stack import MODEL_DIR, Stack, _end, _first_line, _start, wait_until_serving
from burst import ENGINE
from start import CONNECTIONS, PROMPT, Found, ask, connections
from trtmesh.chassis.grpc.client import Call, ClientConnection
from trtmesh.tools.fleet_replay.trace import Arrival
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

STREAMS, ENDLESS = 64, 1_000_000
SETTLED_SECONDS, MEASURED_SECONDS = 1.0, 2.0
MOST_SETTLING = 60
WORKERS = (1, 8, 32, 64)
ADAPTERS = (10, 10_000)
WAITING, ITEMS_OF_A_REQUEST = 10_000, 1000
MANY_ITEMS = ("--admission-max-items", "30000", "--admission-max-queued-items", "30000")
ROOM = ("--simulated-limits-max-batch-size", str(STREAMS))

Figures = dict[str, Any]


@contextmanager
def mesh(workers: int, flags: Sequence[str], router_flags: Sequence[str] = ()) -> Iterator[Stack]:
    """A router, a tokenizer and so many workers."""
    children: list[Any] = []
    fleet = str(Path(__file__).with_name("_simulated_fleet.py"))
    try:
        tokenizer = _start(children, "tokenizer", "--port", "0", "--model-dir", str(MODEL_DIR))
        line = _first_line(children, "fleet", [sys.executable, fleet, str(workers), *flags])
        engines = children[-1].pid
        router = _start(
            *(children, "router", "--port", "0", "--admin-port", "0", "--http-port", "none"),
            *("--engines", ",".join(json.loads(line)), "--tokenizers", tokenizer["address"]),
            *router_flags,
        )
        wait_until_serving(router["address"])
        pids = {"router": router["pid"], "tokenizer": tokenizer["pid"], "engines": engines}
        yield Stack(router["address"], pids)
    finally:
        _end(children)


class Streams:
    """Endless streams of a mesh."""

    def __init__(self, opened: Sequence[ClientConnection]) -> None:
        self._opened = opened
        self.tokens = 0
        self.begun = 0

    async def run(self, number: int) -> None:
        door = DOORS["native"]
        call = self._opened[number % len(self._opened)].open(door.method)
        await call.write(door.request(PROMPT, ENDLESS))
        call.half_close()
        first = True
        async for message in call:
            self.begun += first
            first = False
            # Tokens merge where anything lags.
            for event in router_pb.GenerateResponse.FromString(message).events:
                self.tokens += len(event.tokens.token_ids)
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
    note(found, before, started.cpu_seconds(), streams.tokens - tokens)


def note(found: Found, before: Mapping[str, float], after: Mapping[str, float], count: int) -> None:
    used = {name: (after[name] - before[name]) / count * 1e6 for name in after}
    for name, microseconds in used.items():
        found.note(f"{name}_us", microseconds)
    found.note("services_us", sum(used.values()))


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
    counted = {number: {at_once: Found() for at_once in (1, 32)} for number in ADAPTERS}
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
                for at_once, found in counted[number].items():
                    chosen = random.Random(turn).choices(range(number), k=600)
                    before = each.cpu_seconds()
                    began = time.perf_counter()
                    await serve_adapters(opened[number], chosen, at_once, weights=False)
                    if turn:
                        found.note("seconds_us", (time.perf_counter() - began) / 600 * 1e6)
                        note(found, before, each.cpu_seconds(), 600)
    return {
        f"{at_once}_at_once": compared(
            {str(number): found[at_once] for number, found in counted.items()}
        )
        for at_once in (1, 32)
    }


async def serve_adapters(
    opened: Sequence[ClientConnection], adapters: Sequence[int], at_once: int, *, weights: bool
) -> None:
    """Asks for a token of each, so many at once."""
    left, door = iter(adapters), DOORS["native"]

    async def client(connection: ClientConnection) -> None:
        for adapter in left:
            arrival = Arrival(0.0, 8, 1, 32, (), adapter=str(adapter), adapter_rank=8)
            await ask(connection, door, request_of(arrival, weights=weights), 1)

    async with asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(client(opened[number % len(opened)]))


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
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    config = pb.GenerationConfig(
        stopping=pb.StoppingConfig(max_tokens=1), output=pb.OutputConfig(text=False)
    )
    items = [router_pb.GenerateItem(prompt=prompt)] * ITEMS_OF_A_REQUEST
    request = router_pb.GenerateRequest(items=items, config=config).SerializeToString()
    async with connections(started.address, 1) as (connection,):
        before = await used(started)
        calls = [connection.open(DOORS["native"].method) for _ in range(count // len(items))]
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
        if DOORS["native"].begins(message):
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


async def main(arguments: argparse.Namespace) -> None:
    results = {}
    for part in arguments.parts:
        results[part] = await PARTS[part](arguments.runs)
        print(f"{part}: {json.dumps(results[part])}", file=sys.stderr)
    print(json.dumps(results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse()))
