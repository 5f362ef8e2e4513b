"""Measures the cost of a streamed token through router, tokenizer and simulated engine, by the native API.

Prints for 64, 256 and 1,000 streams at a 10 ms step, and for 64 streams flat out: inter-token latency and time to
first token at the client, tokens a second, and the CPU time of each process per token. Every token must arrive
exactly once, or the run fails. `floor` is a server that only sends the same messages through grpc.aio
in the same run: the cost of the library and the machine.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import get_args

from _doors import NATIVE
from _load import Figures, run_bench, together
from _stack import Shape, Stack, bare_server, stack
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.temporary_ca import temporary_ca
from trtmesh.tools.bench.figures import percentile

STEP_MS = 10
FLAT_OUT_TOKENS = 2048


async def run_once(
    mesh: Stack, streams: int, max_tokens: int, tls: ClientTls | None = None
) -> Figures:
    """Sends `streams` requests at once and returns latencies, and CPU per streamed token."""
    found = await together(mesh, NATIVE, streams, max_tokens, tls)
    gaps = found.gaps_ms() or [0.0]
    cpu = {**found.cpu_us, "client": found.client_us}
    return {
        "itl_p50_ms": round(percentile(gaps, 50), 2),
        "itl_p99_ms": round(percentile(gaps, 99), 2),
        "ttft_p50_ms": round(percentile(found.first_ms(), 50), 1),
        "tokens_per_second": round(found.tokens / found.seconds),
        "tokens_per_message": round(found.tokens / (len(gaps) + streams), 2),
        "cpu_us_per_token": {name: round(each, 1) for name, each in cpu.items()},
        "services_cpu_us_per_token": round(found.services_us, 1),
    }


async def measure(step_ms: float, streams: int, max_tokens: int, runs: int) -> Figures:
    """Returns the run with the median CPU of the services, after a warm-up run."""
    with stack("--simulated-timing-step-ms", str(step_ms)) as mesh:
        return await median_of(mesh, f"step {step_ms:g} ms", streams, max_tokens, runs)


async def measure_floor(streams: int, max_tokens: int, runs: int) -> Figures:
    """Measures the bare server in the same way."""
    with bare_server(STEP_MS) as server:
        return await median_of(server, "floor", streams, max_tokens, runs)


async def median_of(server: Stack, name: str, streams: int, max_tokens: int, runs: int) -> Figures:
    await run_once(server, min(streams, 64), 64)
    median = by_cpu([await run_once(server, streams, max_tokens) for _ in range(runs)])
    print(f"{streams} streams, {name}: {json.dumps(median)}", file=sys.stderr)
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


def by_cpu(results: list[Figures]) -> Figures:
    """The run with the median CPU of the services."""
    return sorted(results, key=lambda result: result["services_cpu_us_per_token"])[
        len(results) // 2
    ]


async def main(
    *,
    streams: tuple[int, ...] = (64, 256, 1000),
    tokens: int = 256,
    runs: int = 3,
    shapes: bool = False,
    tls: bool = False,
) -> None:
    """`shapes`: only one stream, by processes. `tls`: only TLS against plain text."""
    if tls:
        for count in streams:
            compared = await measure_tls(count, tokens, runs)
            print(json.dumps({"streams": count, **compared}))
        return
    if shapes:
        print(json.dumps(await measure_shapes(tokens, runs)))
        return
    paced = {}
    for count in streams:
        mesh = await measure(STEP_MS, count, tokens, runs)
        paced[str(count)] = mesh | {"floor": await measure_floor(count, tokens, runs)}
    flat_out = await measure(0, 64, FLAT_OUT_TOKENS, runs)
    print(json.dumps({"step_ms": STEP_MS, "streams": paced, "flat_out": flat_out}))


if __name__ == "__main__":
    run_bench(main)
