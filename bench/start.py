"""Measures what the start of a request costs, and whom it disturbs, from the text to the first token.

The longest gap of 16 streams beside bursts of 64, 500 and 2,000 starts and 500 cancels; requests a second and CPU a
request, one after the other, with pauses of 10 ms, and many at once, by the native door and by `ensemble`; time to
first token of one request and of 64 that begin together, with texts of 9 and of 200 tokens; what the mesh adds to a
lone request of 200 tokens; CPU of a step with 1 to 256 streams. Requests and first tokens are measured with the
processes that `--shapes` names. `counts` does not depend on the machine: what each process does for a lone request of
one token and for a lone step, as `tests/house/profiled.py` counts it.
`floor` is a server that only sends messages through grpc.aio. Every request must end with its tokens, or the run fails.
`--peer triton://HOST:PORT` or `--peer native://HOST:PORT` measures another system in the same run and with the same
client, without its CPU. Its streams have bounded lengths, and none is cancelled: Triton goes on with cancelled requests
until its memory is gone.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import burst
import data_path
from _doors import DOORS, Door
from _load import CONNECTIONS, PROMPT, ask, at_once, connections, microseconds
from _options import run_bench
from _stack import Shape, Stack, samples, stack, wait_until_serving
from _turns import Figures, Found, by_service, in_turn
from trtmesh.chassis.grpc.client import ClientConnection, Method
from trtmesh.chassis.revisions import SCHEMA_REVISION
from trtmesh.v1 import engine_pb2 as engine_pb

# The processes that count themselves are those of the tests.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from house.way import Process
from house.way import mesh as counted_mesh

SERVICES = Path(__file__).parents[1] / "services"
STEP_MS = 10
LONE_TOKENS = 200
LONE_TEXT = "def fibonacci(n):\n    return n\n\n" * 18
STEADY_SECONDS = 4.0
PAUSE_SECONDS = 0.01
"""Between lone requests: cores have fallen asleep."""
PEER_TOKENS = 500
"""Of a peer's streams beside bursts."""
COUNTED_STEP_MS = 50
"""Slow enough that a step has ended everywhere before the next one, also where every call is counted."""
COUNTED_REQUESTS, COUNTED_TOKENS = 10, (4, 24)
CONNECT: Method[engine_pb.EngineServiceConnectRequest, engine_pb.EngineServiceConnectResponse] = (
    Method(
        "/trtmesh.v1.EngineService/Connect",
        engine_pb.EngineServiceConnectRequest.SerializeToString,
        engine_pb.EngineServiceConnectResponse.FromString,
    )
)
PARTS = ("counts", "requests", "lone", "first_tokens", "gaps", "steps", "floor")
PEERS = {"triton": "ensemble", "native": "native"}


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `tokens` tokens, `at_once` at any time."""

    door: str
    at_once: int
    tokens: int = 1
    text: str = PROMPT
    pause: float = 0.0
    """Seconds between two requests, which no figure contains."""

    @property
    def name(self) -> str:
        return (
            f"{self.door}_{self.at_once}"
            + (f"_of_{self.tokens}_tokens" if self.tokens > 1 else "")
            + ("_long" if self.text == LONE_TEXT else "")
            + ("_paused" if self.pause else "")
        )


LOADS = (
    *(Load(door, count) for door in DOORS for count in (1, 16, 32, 64, 256)),
    *(Load(door, 1, pause=PAUSE_SECONDS) for door in DOORS),
    *(Load(door, count, text=LONE_TEXT) for door in DOORS for count in (1, 32)),
    *(Load(door, 16, tokens=8) for door in DOORS),
    Load("native", 16, tokens=8, text=LONE_TEXT),
)


async def served(address: str, load: Load, count: int) -> float:
    """Requests served per second."""
    door = DOORS[load.door]
    request, paused = door.request(load.text, load.tokens), 0.0

    async def once(connection: ClientConnection) -> None:
        nonlocal paused
        await ask(connection, door, request, load.tokens)
        if load.pause:
            ended = time.perf_counter()
            await asyncio.sleep(load.pause)
            paused += time.perf_counter() - ended

    async with connections(address, min(CONNECTIONS, load.at_once)) as opened:
        calls = [partial(once, opened[number % len(opened)]) for number in range(load.at_once)]
        seconds, _ = await at_once(calls, count)
        return count / (seconds - paused / load.at_once)


async def measure_requests(
    address: str, mesh: Stack | None, loads: list[Load], seconds: float, runs: int
) -> Figures:
    """Rates and CPU of each load, in turn."""

    async def turn(load: Load, count: int) -> Mapping[str, float]:
        before = mesh.cpu_seconds() if mesh else {}
        rate = await served(address, load, count)
        used = microseconds(before, mesh.cpu_seconds() if mesh else {}, count)
        return {"per_second": rate, **by_service(used)}

    turns = {}
    for load in loads:
        count = max(load.at_once, int(seconds * await served(address, load, 300)))
        turns[load.name] = partial(turn, load, count)
    return {name: each.medians() for name, each in (await in_turn(turns, runs)).items()}


async def measure_first_tokens(address: str, door: str, runs: int) -> Figures:
    """Median time to first token of one request, and of 64 that begin together."""
    chosen, found = DOORS[door], Found()
    loads = [(1, PROMPT, ""), (64, PROMPT, ""), (1, LONE_TEXT, "_long"), (64, LONE_TEXT, "_long")]
    async with connections(address, CONNECTIONS) as opened:
        for _ in range(runs):
            for together, text, name in loads:
                request = chosen.request(text, 8)
                for _ in range(64 if together == 1 else 4):
                    asked = (
                        ask(opened[number % CONNECTIONS], chosen, request, 8)
                        for number in range(together)
                    )
                    firsts = await asyncio.gather(*asked)
                    found.note(f"ttft_p50_ms_{together}{name}", statistics.median(firsts) * 1e3)
    return found.medians()


async def measure_counts(shape: Shape, doors: Sequence[str], runs: int) -> Figures:
    """What each process does for a lone request of one token, and for one more token: medians by door."""
    engine = ("--backend", "simulated", "--simulated-timing-step-ms", str(COUNTED_STEP_MS))
    figures: Figures = {}
    with counted_mesh(SERVICES, *engine, shape=shape) as processes:
        router = processes[0].announced()
        wait_until_serving(router)
        async with connections(router, 1) as (connection,):
            for door in doors:
                found = Found()
                await _window(processes, connection, DOORS[door], 3, 1)
                for _ in range(runs):
                    for name, (few, many) in {
                        "request": ((0, 1), (COUNTED_REQUESTS, 1)),
                        "step": ((1, COUNTED_TOKENS[0]), (1, COUNTED_TOKENS[1])),
                    }.items():
                        times = many[0] - few[0] or many[1] - few[1]
                        less = await _window(processes, connection, DOORS[door], *few)
                        more = await _window(processes, connection, DOORS[door], *many)
                        for each, count in more.items():
                            found.note(f"{name} {each}", (count - less.get(each, 0)) / times)
                figures[door] = found.medians()
    return {door: _by_process(f"{shape}, {door}", each) for door, each in figures.items()}


async def _window(
    processes: Sequence[Process], connection: ClientConnection, door: Door, count: int, tokens: int
) -> dict[str, int]:
    """What the processes do while so many requests come one by one, by process and kind."""
    request = door.request(PROMPT, tokens)
    for process in processes:
        await process.begin()
    for _ in range(count):
        await ask(connection, door, request, tokens)
        # The last words between the services come after the client's.
        await asyncio.sleep(COUNTED_STEP_MS / 1000)
    return {
        f"{process.name} {kind}": number
        for process in processes
        for kind, number in (await process.end()).counts.items()
    }


def _by_process(door: str, medians: Mapping[str, float]) -> Figures:
    """Sorts the counts, and prints a line for each process."""
    found: Figures = {}
    for name, count in medians.items():
        what, process, kind = name.split()
        found.setdefault(what, {}).setdefault(process, {})[kind] = count
    for what, processes in found.items():
        for process, counts in processes.items():
            told = ", ".join(f"{kind} {count:g}" for kind, count in counts.items())
            print(f"{door} {what}, {process}: {told}", file=sys.stderr)
    return found


class BareEngine:
    """A client of the engine itself: what a request takes without router and tokenizer."""

    def __init__(self, connection: ClientConnection) -> None:
        self._call = connection.open(CONNECT)
        self._handle = self._steps = 0

    async def greet(self) -> None:
        hello = engine_pb.HelloCommand(
            router="bench", schema_revision=SCHEMA_REVISION, unacknowledged_steps=4
        )
        await self._send(engine_pb.EngineCommand(hello=hello))

    async def ask(self, ids: list[int]) -> float:
        """Seconds to the single token of a request."""
        self._handle += 1
        submit = engine_pb.SubmitCommand(handle=self._handle, request_id="lone", token_ids=ids)
        submit.config.stopping.max_tokens = 1
        began = time.perf_counter()
        await self._send(engine_pb.EngineCommand(submit=submit))
        first = 0.0
        while (response := await self._call.read()) is not None:
            for event in response.events:
                if not event.HasField("step"):
                    continue
                self._steps += 1
                if len(event.step.token_ids):
                    first = time.perf_counter() - began
                if event.step.ends:
                    acknowledge = engine_pb.AcknowledgeCommand(received_steps=self._steps)
                    await self._send(engine_pb.EngineCommand(acknowledge=acknowledge))
                    return first
        raise SystemExit("the engine ended the stream")

    async def _send(self, command: engine_pb.EngineCommand) -> None:
        await self._call.write(engine_pb.EngineServiceConnectRequest(commands=[command]))


async def measure_lone(mesh: Stack, runs: int) -> Figures:
    """Median times to the token of a lone request of 200 tokens: by text, by ids, and by the engine alone, in turn."""
    native = DOORS["native"]
    ids = list(range(1, LONE_TOKENS + 1))
    text, by_ids = native.request(LONE_TEXT, 1), native.request(ids, 1)
    async with (
        connections(mesh.address, 1) as (router,),
        connections(mesh.engine_address, 1) as (engine,),
    ):
        bare = BareEngine(engine)
        await bare.greet()

        async def turn(way: Callable[[], Awaitable[float]]) -> Mapping[str, float]:
            return {"ms": await way() * 1e3}

        ways: dict[str, Callable[[], Awaitable[float]]] = {
            "text": lambda: ask(router, native, text, 1),
            "ids": lambda: ask(router, native, by_ids, 1),
            "engine": lambda: bare.ask(ids),
        }
        found = await in_turn({name: partial(turn, way) for name, way in ways.items()}, 100 * runs)
    figures = {f"{name}_ms": each.medians()["ms"] for name, each in found.items()}
    return figures | {
        f"{name}_added_ms": round(figures[f"{name}_ms"] - figures["engine_ms"], 2)
        for name in ("text", "ids")
    }


def generated_tokens(mesh: Stack) -> int:
    """The engine's own count."""
    return int(samples(mesh.engine_metrics_port)["trtmesh_engine_generated_tokens_total"])


async def measure_steps(mesh: Stack, streams: int, door: str, runs: int) -> Figures:
    """CPU of the services per token of running streams, their starts excluded."""
    found = Found()
    async with burst.steady(mesh.address, streams, door):
        for _ in range(runs):
            tokens, before = generated_tokens(mesh), mesh.cpu_seconds()
            await asyncio.sleep(STEADY_SECONDS)
            after, tokens = mesh.cpu_seconds(), generated_tokens(mesh) - tokens
            found.note_all(by_service(microseconds(before, after, tokens)))
    return found.medians()


async def measure_peer(url: str, bursts: Sequence[int], runs: int, seconds: float) -> Figures:
    """The rows of another system: the paces of its steps are its own."""
    scheme, _, address = url.partition("://")
    if scheme not in PEERS or not address:
        raise SystemExit(f"--peer is {url!r}, not triton://HOST:PORT or native://HOST:PORT")
    door = PEERS[scheme]
    loads = [load for load in LOADS if load.door == door]
    return {
        "requests": await measure_requests(address, None, loads, seconds, runs),
        "first_tokens": await measure_first_tokens(address, door, runs),
        "gaps": await burst.measure(address, 16, bursts, runs, door, PEER_TOKENS),
    }


async def measure(
    parts: Sequence[str],
    doors: Sequence[str],
    shapes: Sequence[Shape],
    bursts: Sequence[int],
    runs: int,
    seconds: float,
) -> Figures:
    """The rows of trtmesh."""
    results = Figures()
    if "counts" in parts:
        results["counts"] = {
            shape: await measure_counts(shape, doors, runs) for shape in get_args(Shape)
        }
    paced = ("--metrics-port", "0", *burst.ENGINE)
    at_once = "--simulated-timing-step-ms", "0"
    if "requests" in parts:
        loads = [load for load in LOADS if load.door in doors]
        by_shape = results["requests"] = Figures()
        for shape in shapes:
            with stack(*at_once, shape=shape) as mesh:
                by_shape[shape] = await measure_requests(mesh.address, mesh, loads, seconds, runs)
    if "lone" in parts:
        with stack(*at_once) as mesh:
            results["lone"] = await measure_lone(mesh, runs)
    if "first_tokens" in parts:
        by_shape = results["first_tokens"] = Figures()
        for shape in shapes:
            with stack(*paced, shape=shape) as mesh:
                by_shape[shape] = {
                    door: await measure_first_tokens(mesh.address, door, runs) for door in doors
                }
    if "gaps" in parts:
        with stack(*paced) as mesh:
            results["gaps"] = {
                door: await burst.measure(mesh.address, 16, bursts, runs, door) for door in doors
            }
    if "steps" in parts:
        steps = results["steps"] = Figures()
        with stack(*paced) as mesh:
            for streams, door in ((1, "native"), (8, "native"), (64, "native"), (256, "native"),
                                  (64, "ensemble")):  # fmt: skip
                if door in doors:
                    steps[f"{door}_{streams}"] = await measure_steps(mesh, streams, door, runs)
    if "floor" in parts:
        results["floor"] = await data_path.measure_floor(64, 256, runs)
    return results


async def main(
    *,
    parts: Annotated[tuple[str, ...], PARTS] = PARTS,
    doors: Annotated[tuple[str, ...], DOORS] = tuple(DOORS),
    shapes: tuple[Shape, ...] = ("three processes",),
    bursts: tuple[int, ...] = (64, 500, 2000),
    runs: int = 5,
    seconds: float = 1.0,
    peer: str | None = None,
) -> Figures:
    """`seconds` is the time of a load in each of the runs, `peer` triton://HOST:PORT or native://HOST:PORT."""
    results = await measure(parts, doors, shapes, bursts, runs, seconds)
    if peer:
        results["peer"] = {"address": peer} | await measure_peer(peer, bursts, runs, seconds)
    return {"step_ms": STEP_MS, **results}


if __name__ == "__main__":
    run_bench(main)
