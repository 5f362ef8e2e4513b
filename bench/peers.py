"""Measures starts of requests by a mesh and by SMG, a gateway in Rust, both before an engine of ours, in one run.

In turn: one-token requests a second with texts of 200 tokens, 1 and 32 at once, requests of 8 tokens with 16 at once,
and the times to first token of 64 that begin together. The mesh is asked by its native API, SMG over HTTP/1.1 with
server-sent events, as its clients do; each client keeps its connections and parses answers when they are whole. The
engines are simulated and as fast as they can be, but for the first tokens, which have a step of 10 ms. CPU is of the
processes of each side, without the client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import _smg
from _doors import DOORS, Http
from _load import CONNECTIONS, Found, ask, connections, run_bench
from _smg import MODEL
from _stack import stack
from start import LONE_TEXT
from trtmesh.chassis.grpc.client import ClientConnection

SIZE = ("--simulated-vocabulary-size", "6144")
ENGINE = ("--model", MODEL, *SIZE)
STEP_MS = 10
TOGETHER = 64

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of `tokens` tokens, `at_once` at any time."""

    name: str
    at_once: int
    tokens: int


LOADS = (Load("1", 1, 1), Load("32", 32, 1), Load("16_of_8_tokens", 16, 8))


class Client(Protocol):
    """Asks one side."""

    async def ask(self, number: int, tokens: int) -> float:
        """Seconds to the first token. Raises SystemExit unless every token comes."""


class NativeClient:
    """A client of the native API."""

    def __init__(self, opened: list[ClientConnection]) -> None:
        self._opened = opened

    async def ask(self, number: int, tokens: int) -> float:
        door = DOORS["native"]
        request = door.request(LONE_TEXT, tokens)
        return await ask(self._opened[number % len(self._opened)], door, request, tokens)


class CompletionsClient:
    """A client of /v1/completions over HTTP/1.1, with a connection for each request at a time."""

    def __init__(self, url: str) -> None:
        self._http = Http(url)

    async def ask(self, number: int, tokens: int) -> float:
        fields = {"model": MODEL, "prompt": LONE_TEXT, "max_tokens": tokens}
        began, parts = time.perf_counter(), list[float]()
        answer = await self._http.post(
            "/v1/completions",
            fields | {"stream": True, "ignore_eos": True},
            lambda: parts.append(time.perf_counter()),
        )
        events = [json.loads(line) for line in answer.split(b"data: ")[1:-1]]
        ended = bool(events) and events[-1]["choices"][0]["finish_reason"] == "length"
        if not ended or not answer.endswith(b"data: [DONE]\n\n"):
            raise SystemExit(f"an answer of {tokens} tokens is incomplete: {answer.decode()}")
        return parts[0] - began


@dataclass(frozen=True, slots=True)
class Side:
    """One side under measurement: its client, and the CPU time of its processes so far."""

    client: Client
    cpu_seconds: Callable[[], float]


@asynccontextmanager
async def mesh(step_ms: float) -> AsyncIterator[Side]:
    """A router, a tokenizer and an engine."""
    with stack("--simulated-timing-step-ms", str(step_ms), *ENGINE) as started:
        async with connections(started.address, CONNECTIONS) as opened:
            yield Side(NativeClient(opened), lambda: sum(started.cpu_seconds().values()))


@asynccontextmanager
async def smg(step_ms: float) -> AsyncIterator[Side]:
    """SMG before an engine."""
    async with _smg.smg(*SIZE, "--simulated-timing-step-ms", str(step_ms)) as gateway:
        yield Side(CompletionsClient(gateway.url), gateway.cpu_seconds)


async def served(side: Side, load: Load, count: int) -> float:
    """Requests served per second."""
    left = iter(range(count))

    async def client(number: int) -> None:
        for _ in left:
            await side.client.ask(number, load.tokens)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for number in range(load.at_once):
            group.create_task(client(number))
    return count / (time.perf_counter() - began)


async def measure_loads(sides: Mapping[str, Side], seconds: float, runs: int) -> Figures:
    """Requests a second, and CPU of each, in turn."""
    found: dict[str, Found] = {name: Found() for name in sides}
    for load in LOADS:
        counts = {
            name: max(load.at_once, int(seconds * await served(side, load, 200)))
            for name, side in sides.items()
        }
        for _ in range(runs):
            for name, side in sides.items():
                before = side.cpu_seconds()
                found[name].note(load.name, await served(side, load, counts[name]))
                used = (side.cpu_seconds() - before) / counts[name] * 1e6
                found[name].note(f"{load.name}_us", used)
    return {name: each.medians() for name, each in found.items()}


async def measure_first_tokens(sides: Mapping[str, Side], runs: int) -> Figures:
    """Median times to first token of requests that begin together, in ms, in turn."""
    found: dict[str, Found] = {name: Found() for name in sides}
    for turn in range(4 * runs + 1):
        for name, side in sides.items():
            firsts = await asyncio.gather(*(side.client.ask(n, 8) for n in range(TOGETHER)))
            if turn:
                found[name].note(f"ttft_p50_ms_{TOGETHER}", statistics.median(firsts) * 1e3)
    return {name: each.medians() for name, each in found.items()}


async def main(arguments: argparse.Namespace) -> None:
    async with mesh(0) as ours, smg(0) as theirs:
        loads = await measure_loads(
            {"mesh": ours, "smg": theirs}, arguments.seconds, arguments.runs
        )
    async with mesh(STEP_MS) as ours, smg(STEP_MS) as theirs:
        firsts = await measure_first_tokens({"mesh": ours, "smg": theirs}, arguments.runs)
    results = {name: each | firsts[name] for name, each in loads.items()}
    ratio = {
        name: round(value / results["smg"][name], 2) for name, value in results["mesh"].items()
    }
    print(json.dumps({**results, "mesh_over_smg": ratio}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="time of a load, in each of the runs"
    )
    return parser.parse_args()


if __name__ == "__main__":
    run_bench(main(parse()))
