"""Measures what many workers, adapters and waiting items cost a running stream and the start of a request.

* `workers`: 64 streams at a 10 ms step, spread over 1 to 64 workers.
* `adapters`: one-token requests with a random adapter of 10, and of 10,000, all of them in the worker's memory.
* `waiting`: 64 streams at a 10 ms step beside nothing, and beside 10,000 items in the router's queue or the worker's.

What is compared is measured in turn, so that a ratio has little of the machine's drift. CPU µs a token, or a request,
of each process; the workers live in one process (`_simulated_fleet.py`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Annotated

from _doors import NATIVE
from _load import CONNECTIONS, ask, at_once, connections, microseconds
from _lora_placement import request_of
from _options import run_bench, tell
from _stack import Stack, routers, samples, simulated_fleet
from _turns import Figures, Found, Values, by_service, in_turn
from burst import ENGINE, steady
from trtmesh.chassis.grpc.client import Call, ClientConnection
from trtmesh.tools.fleet_replay.trace import Arrival
from trtmesh.v1 import router_pb2 as router_pb

STREAMS = 64
SETTLED_SECONDS, MEASURED_SECONDS = 1.0, 2.0
MOST_SETTLING = 60
WORKERS = (1, 8, 32, 64)
ADAPTERS, ASKED = (10, 10_000), 600
"""Numbers of adapters, and the requests of a turn."""
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
        yield Stack(router["address"], pids, router_metrics_port=router["metrics_port"])


async def token_cost(started: Stack) -> Values:
    """CPU of a token while streams run."""
    tokens, before = streamed_tokens(started), started.cpu_seconds()
    await asyncio.sleep(MEASURED_SECONDS)
    after, tokens = started.cpu_seconds(), streamed_tokens(started) - tokens
    return by_service(microseconds(before, after, tokens))


def streamed_tokens(started: Stack) -> float:
    """The router's own count."""
    return samples(started.router_metrics_port)["trtmesh_router_tokens_out_total"]


async def measure_workers(runs: int) -> Figures:
    """A token of 64 streams by the number of workers, and its ratio to that of one worker."""

    async def turn(started: Stack) -> Values:
        async with steady(started.address, STREAMS):
            return await token_cost(started)

    with ExitStack() as meshes:
        policy = ("--placement-policy", "round_robin")
        turns = {
            str(workers): partial(turn, meshes.enter_context(mesh(workers, ENGINE, policy)))
            for workers in WORKERS
        }
        return compared(await in_turn(turns, runs))


async def measure_adapters(runs: int) -> Figures:
    """A lone request, and one of 32 at once, by the number of adapters."""
    most, seeds = str(2 * max(ADAPTERS)), count()
    flags = (
        *("--simulated-timing-step-ms", "0", "--simulated-adapters-slots", most),
        *("--simulated-adapters-host-adapters", most),
    )

    async def turn(
        started: Stack, opened: Sequence[ClientConnection], number: int, together: int
    ) -> Values:
        chosen = random.Random(next(seeds)).choices(range(number), k=ASKED)
        before, began = started.cpu_seconds(), time.perf_counter()
        await serve_adapters(opened, chosen, together, weights=False)
        seconds = (time.perf_counter() - began) / ASKED * 1e6
        used = by_service(microseconds(before, started.cpu_seconds(), ASKED))
        return {"seconds_us": seconds, **used}

    turns = {}
    async with AsyncExitStack() as started:
        for number in ADAPTERS:
            own = started.enter_context(mesh(1, flags))
            opened = await started.enter_async_context(connections(own.address, CONNECTIONS))
            await serve_adapters(opened, [*range(number)], 64, weights=True)
            for together in (1, 32):
                turns[together, number] = partial(turn, own, opened, number, together)
        found = await in_turn(turns, runs)
    return {
        f"{together}_at_once": compared(
            {str(number): found[together, number] for number in ADAPTERS}
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

    async def turn(started: Stack, items: int) -> Values:
        # Anew, since no sequence is endless.
        async with (
            steady(started.address, STREAMS),
            queued(started, items) if items else nullcontext(),
        ):
            return await token_cost(started)

    figures = Figures()
    for name, (of_engine, of_router) in places.items():
        with mesh(1, (*ENGINE, *of_engine), (*MANY_ITEMS, *of_router)) as started:
            turns = {str(items): partial(turn, started, items) for items in (0, WAITING)}
            figures[name] = compared(await in_turn(turns, runs))
    return figures


@asynccontextmanager
async def queued(started: Stack, items: int) -> AsyncIterator[None]:
    """Has so many items wait until the block ends."""
    given = router_pb.GenerateRequest.FromString(NATIVE.request([1, 2, 3], 1, text=False))
    given.items.extend([given.items[0]] * (ITEMS_OF_A_REQUEST - 1))
    request = given.SerializeToString()
    async with connections(started.address, 1) as (connection,):
        before = await used(started)
        calls = [connection.open(NATIVE.method) for _ in range(items // ITEMS_OF_A_REQUEST)]
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
    """Medians, and those of the ratios to the first."""
    (first, base), *others = found.items()
    figures: Figures = {name: each.medians() for name, each in found.items()}
    return figures | {f"{name}_over_{first}": each.over(base) for name, each in others}


PARTS = {
    "workers": measure_workers,
    "adapters": measure_adapters,
    "waiting": measure_waiting,
}


async def main(
    *, parts: Annotated[tuple[str, ...], PARTS] = tuple(PARTS), runs: int = 5
) -> Figures:
    results = {}
    for part in parts:
        results[part] = await PARTS[part](runs)
        tell(part, results[part])
    return results


if __name__ == "__main__":
    run_bench(main)
