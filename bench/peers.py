"""Measures starts of requests by a mesh and by SMG, a gateway in Rust, both before an engine of ours, in one run.

In turn: one-token requests a second with texts of 200 tokens, 1 and 32 at once, requests of 8 tokens with 16 at once,
and the times to first token of 64 that begin together. The mesh is asked by its native API, SMG over HTTP/1.1 with
server-sent events, as its clients do; each client keeps its connections and parses answers when they are whole. The
engines are simulated and as fast as they can be, but for the first tokens, which have a step of 10 ms. CPU is of the
processes of each side, without the client.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import _smg
from _doors import NATIVE, Http
from _load import CONNECTIONS, Figures, Found, Side, ask, connections, in_turn, run_bench
from _smg import MODEL
from _stack import stack
from start import LONE_TEXT
from trtmesh.chassis.grpc.client import ClientConnection

SIZE = ("--simulated-vocabulary-size", "6144")
ENGINE = ("--model", MODEL, *SIZE)
STEP_MS = 10
TOGETHER = 64
LOADS = {"1": (1, 1), "32": (32, 1), "16_of_8_tokens": (16, 8)}
"""Requests at a time, and the tokens of each, by name."""


Ask = Callable[[int], Awaitable[float]]
"""A request of so many tokens, which gives the seconds to the first one."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One side under measurement: how to ask over each connection, and the CPU time of its processes so far."""

    asks: Sequence[Ask]
    cpu_seconds: Callable[[], float]

    def side(self, load: str) -> Side:
        together, tokens = LOADS[load]
        calls = [partial(self.asks[n % len(self.asks)], tokens) for n in range(together)]
        return Side(calls, self.cpu_seconds)


async def ask_natively(connection: ClientConnection, tokens: int) -> float:
    return await ask(connection, NATIVE, NATIVE.request(LONE_TEXT, tokens), tokens)


async def ask_completions(http: Http, tokens: int) -> float:
    """By /v1/completions over HTTP/1.1, with a connection for each request at a time."""
    fields = {"model": MODEL, "prompt": LONE_TEXT, "max_tokens": tokens}
    began, parts = time.perf_counter(), list[float]()
    answer = await http.post(
        "/v1/completions",
        fields | {"stream": True, "ignore_eos": True},
        lambda: parts.append(time.perf_counter()),
    )
    events = [json.loads(line) for line in answer.split(b"data: ")[1:-1]]
    ended = bool(events) and events[-1]["choices"][0]["finish_reason"] == "length"
    if not ended or not answer.endswith(b"data: [DONE]\n\n"):
        raise SystemExit(f"an answer of {tokens} tokens is incomplete: {answer.decode()}")
    return parts[0] - began


@asynccontextmanager
async def peers(step_ms: float) -> AsyncIterator[Mapping[str, Peer]]:
    """A router, a tokenizer and an engine; and SMG before an engine."""
    step = ("--simulated-timing-step-ms", str(step_ms))
    with stack(*step, *ENGINE) as mesh:
        async with (
            connections(mesh.address, CONNECTIONS) as opened,
            _smg.smg(*SIZE, *step) as gateway,
        ):
            asks = [partial(ask_natively, each) for each in opened]
            yield {
                "mesh": Peer(asks, lambda: sum(mesh.cpu_seconds().values())),
                "smg": Peer([partial(ask_completions, Http(gateway.url))], gateway.cpu_seconds),
            }


async def measure_loads(found: Mapping[str, Found], seconds: float, runs: int) -> None:
    """Requests a second, and CPU of each, in turn."""
    async with peers(0) as measured:
        for load, (together, _) in LOADS.items():
            turns = {}
            for name, peer in measured.items():
                rate = (await peer.side(load).turn(200))["per_second"]
                count = max(together, int(seconds * rate))
                turns[name] = partial(peer.side(load).turn, count)
            for name, each in (await in_turn(turns, runs)).items():
                found[name].values[load] = each.values["per_second"]
                found[name].values[f"{load}_us"] = each.values["cpu_us"]


async def measure_first_tokens(found: Mapping[str, Found], runs: int) -> None:
    """Median times to first token of requests that begin together, in ms, in turn."""

    async def turn(peer: Peer) -> Mapping[str, float]:
        asks = (peer.asks[n % len(peer.asks)](8) for n in range(TOGETHER))
        firsts = await asyncio.gather(*asks)
        return {f"ttft_p50_ms_{TOGETHER}": statistics.median(firsts) * 1e3}

    async with peers(STEP_MS) as measured:
        turns = {name: partial(turn, peer) for name, peer in measured.items()}
        for name, each in (await in_turn(turns, 4 * runs)).items():
            found[name].values.update(each.values)


async def main(*, runs: int = 5, seconds: float = 1.0) -> None:
    """`seconds` is the time of a load in each of the runs."""
    found = {"mesh": Found(), "smg": Found()}
    await measure_loads(found, seconds, runs)
    await measure_first_tokens(found, runs)
    results: Figures = {name: each.medians() for name, each in found.items()}
    ratio = {
        name: round(value / results["smg"][name], 2) for name, value in results["mesh"].items()
    }
    print(json.dumps({**results, "mesh_over_smg": ratio}))


if __name__ == "__main__":
    run_bench(main)
