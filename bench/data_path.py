"""Measures the cost of a streamed token through router, tokenizer and simulated engine, by the native API.

Prints for 64, 256 and 1,000 streams at a 10 ms step, and for 64 streams flat out: inter-token latency and time to
first token at the client, tokens a second, and the CPU time of each process per token. Every token must arrive
exactly once, or the run fails. `floor` is a server that only sends the same messages through grpc.aio
in the same run: the cost of the library and the machine.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, get_args

import uvloop
from _stack import Shape, Stack, bare_server, stack
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.temporary_ca import temporary_ca
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

PROMPT = "def fibonacci(n):\n    "
STEP_MS = 10
FLAT_OUT_TOKENS = 2048
MAX_MESSAGE_BYTES = 2**22

Figures = dict[str, Any]
Generate = Callable[[bytes], AsyncIterable[bytes]]


@dataclass(slots=True)
class Record:
    """One stream's messages as bytes, with arrival times."""

    started: float = 0.0
    messages: list[tuple[float, bytes]] = field(default_factory=list)

    def token_arrivals(self, max_tokens: int) -> list[float]:
        """Arrival times of messages with tokens. Raises SystemExit for a missing, repeated or misplaced token."""
        arrivals, tokens, finished = [], 0, False
        for arrival, message in self.messages:
            for event in router_pb.GenerateResponse.FromString(message).events:
                kind = event.WhichOneof("event")
                if kind == "item_failed":
                    raise SystemExit(f"an item failed: {event.item_failed.error.message}")
                finished |= kind == "item_finished"
                if kind == "tokens":
                    if event.tokens.token_offset != tokens:
                        raise SystemExit(f"token {event.tokens.token_offset} came, not {tokens}")
                    tokens += len(event.tokens.token_ids)
                    arrivals.append(arrival)
        if not finished or tokens != max_tokens:
            raise SystemExit(f"{tokens} of {max_tokens} tokens came")
        return arrivals


async def stream(generate: Generate, request: bytes, record: Record) -> None:
    """Sends one request and keeps its messages as bytes: the client shares the machine with the services, so it parses
    them after the run."""
    record.started = time.perf_counter()
    async for message in generate(request):
        record.messages.append((time.perf_counter(), message))


async def run_once(
    mesh: Stack, streams: int, max_tokens: int, tls: ClientTls | None = None
) -> Figures:
    """Sends `streams` requests at once and returns the figures of the run."""
    config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=max_tokens))
    item = router_pb.GenerateItem(prompt=pb.Prompt(text=PROMPT))
    request = router_pb.GenerateRequest(items=[item], config=config).SerializeToString()
    records = [Record() for _ in range(streams)]
    async with open_channel(mesh.address, MAX_MESSAGE_BYTES, tls=tls) as channel:
        await channel.channel_ready()
        generate: Any = channel.unary_stream("/trtmesh.v1.MeshService/Generate")
        before, client_before = mesh.cpu_seconds(), sum(os.times()[:2])
        started = time.perf_counter()
        await asyncio.gather(*(stream(generate, request, record) for record in records))
        seconds = time.perf_counter() - started
        client = sum(os.times()[:2]) - client_before
        after = mesh.cpu_seconds()
    cpu = {name: after[name] - before[name] for name in after} | {"client": client}
    arrivals = [record.token_arrivals(max_tokens) for record in records]
    firsts = [(a[0] - record.started) * 1e3 for a, record in zip(arrivals, records, strict=True)]
    return figures(arrivals, firsts, streams * max_tokens, seconds, cpu)


def figures(
    arrivals: list[list[float]],
    firsts: list[float],
    tokens: int,
    seconds: float,
    cpu: dict[str, float],
) -> Figures:
    """Latencies in milliseconds, CPU in microseconds per streamed token."""
    gaps = [(later - earlier) * 1e3 for times in arrivals for earlier, later in pairwise(times)]
    services = sum(cpu.values()) - cpu["client"]
    return {
        "itl_p50_ms": round(percentile(gaps, 50), 2),
        "itl_p99_ms": round(percentile(gaps, 99), 2),
        "ttft_p50_ms": round(percentile(firsts, 50), 1),
        "tokens_per_second": round(tokens / seconds),
        "tokens_per_message": round(tokens / sum(map(len, arrivals)), 2),
        "cpu_us_per_token": {name: round(used / tokens * 1e6, 1) for name, used in cpu.items()},
        "services_cpu_us_per_token": round(services / tokens * 1e6, 1),
    }


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


async def measure(step_ms: float, streams: int, max_tokens: int, runs: int) -> Figures:
    """Returns the run with the median CPU of the services, after a warm-up run."""
    with stack("--simulated-timing-step-ms", str(step_ms)) as mesh:
        await run_once(mesh, min(streams, 64), 64)
        results = [await run_once(mesh, streams, max_tokens) for _ in range(runs)]
    median = by_cpu(results)
    print(f"{streams} streams, step {step_ms:g} ms: {json.dumps(median)}", file=sys.stderr)
    return median


async def measure_tls(streams: int, max_tokens: int, runs: int) -> Figures:
    """Returns the figures over plain text and over TLS, in alternation, and the ratio of the services' CPU."""
    step = ("--simulated-timing-step-ms", str(STEP_MS))
    with temporary_ca("127.0.0.1") as made, stack(*step) as plain, stack(*step, tls=made) as secure:
        pairs = []
        for _ in range(runs + 1):
            first = await run_once(plain, streams, max_tokens)
            pairs.append((first, await run_once(secure, streams, max_tokens, made.client)))
    # The first pair warms up.
    text, encrypted = (by_cpu(list(kind)) for kind in zip(*pairs[1:], strict=True))
    key = "services_cpu_us_per_token"
    return {"plain": text, "tls": encrypted, "ratio": round(encrypted[key] / text[key], 2)}


async def measure_shapes(max_tokens: int, runs: int) -> Figures:
    """Returns the figures of one stream with the tokenizer, then the engine too, inside the router, in alternation."""
    step = ("--simulated-timing-step-ms", str(STEP_MS))
    with ExitStack() as meshes:
        started = {each: meshes.enter_context(stack(*step, shape=each)) for each in get_args(Shape)}
        results: dict[str, list[Figures]] = {each: [] for each in started}
        for _ in range(runs + 1):
            for shape, mesh in started.items():
                results[shape].append(await run_once(mesh, 1, max_tokens))
    # The first turn warms up.
    return {shape: by_cpu(found[1:]) for shape, found in results.items()}


async def measure_floor(streams: int, max_tokens: int, runs: int) -> Figures:
    """Measures the bare server in the same way."""
    with bare_server(STEP_MS) as server:
        await run_once(server, min(streams, 64), 64)
        median = by_cpu([await run_once(server, streams, max_tokens) for _ in range(runs)])
    print(f"{streams} streams, floor: {json.dumps(median)}", file=sys.stderr)
    return median


def by_cpu(results: list[Figures]) -> Figures:
    """The run with the median CPU of the services."""
    return sorted(results, key=lambda result: result["services_cpu_us_per_token"])[
        len(results) // 2
    ]


async def main(arguments: argparse.Namespace) -> None:
    if arguments.tls:
        for streams in arguments.streams:
            compared = await measure_tls(streams, arguments.tokens, arguments.runs)
            print(json.dumps({"streams": streams, **compared}))
        return
    if arguments.shapes:
        print(json.dumps(await measure_shapes(arguments.tokens, arguments.runs)))
        return
    paced = {}
    for streams in arguments.streams:
        mesh = await measure(STEP_MS, streams, arguments.tokens, arguments.runs)
        floor = await measure_floor(streams, arguments.tokens, arguments.runs)
        paced[str(streams)] = mesh | {"floor": floor}
    flat_out = await measure(0, 64, FLAT_OUT_TOKENS, arguments.runs)
    print(json.dumps({"step_ms": STEP_MS, "streams": paced, "flat_out": flat_out}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256, 1000])
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each paced stream")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--shapes", action="store_true", help="only one stream, by processes")
    parser.add_argument("--tls", action="store_true", help="only TLS against plain text")
    return parser.parse_args()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse()))
