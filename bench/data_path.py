"""Measures the cost of a streamed token through router, tokenizer and simulated engine, by the native API.

Prints for 64, 256 and 1,000 streams at a 10 ms step, and for 64 streams flat out: inter-token latency and time to
first token at the client, tokens a second, and the CPU time of each process per token. Every token must arrive
exactly once, or the run fails. `floor` is a server that does nothing but send such messages through grpc.aio, in the
same run: the cost of the library and the machine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import get_args

from _doors import NATIVE
from _load import PROMPT, together
from _options import run_bench, tell
from _stack import Shape, Stack, echo_server, stack
from _turns import Figures, in_turn
from trtmesh.chassis.tls.client import ClientTls
from trtmesh.cli.temporary_ca import temporary_ca
from trtmesh.tools.bench.figures import percentile

STEP_MS = 10
STEP = ("--simulated-timing-step-ms", str(STEP_MS))
FLAT_OUT_TOKENS = 2048

Turn = Callable[[], Awaitable[dict[str, float]]]


async def run_once(
    mesh: Stack, streams: int, tokens: int, tls: ClientTls | None = None, prompt: str = PROMPT
) -> dict[str, float]:
    """Sends `streams` requests at once and returns latencies, and CPU per streamed token."""
    found = await together(mesh, NATIVE, streams, tokens, tls, prompt)
    gaps = found.gaps_ms() or [0.0]
    return {
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
        "ttft_p50_ms": percentile(found.first_ms(), 50),
        "tokens_per_second": found.tokens / found.seconds,
        "tokens_per_message": found.tokens / (len(gaps) + streams),
        **{f"{name}_us": each for name, each in found.cpu_us.items()},
        "services_us": found.services_us,
        "client_us": found.client_us,
    }


async def measure(step_ms: float, streams: int, tokens: int, runs: int) -> Figures:
    """Medians of the runs."""
    with stack("--simulated-timing-step-ms", str(step_ms)) as mesh:
        found = await in_turn({"mesh": partial(run_once, mesh, streams, tokens)}, runs)
    medians = found["mesh"].medians()
    tell(f"{streams} streams, step {step_ms:g} ms", medians)
    return medians


async def measure_floor(streams: int, tokens: int, runs: int) -> Figures:
    """Measures a server that does nothing in the same way."""
    prompt = f"{tokens} {STEP_MS}"
    with echo_server() as server:
        turn = partial(run_once, server, streams, tokens, prompt=prompt)
        medians = (await in_turn({"floor": turn}, runs))["floor"].medians()
    tell(f"{streams} streams, floor", medians)
    return medians


async def measure_tls(streams: int, tokens: int, runs: int) -> Figures:
    """The figures over plain text and over TLS, and the ratio of the services' CPU."""
    with temporary_ca("127.0.0.1") as made, stack(*STEP) as plain, stack(*STEP, tls=made) as secure:
        found = await in_turn(
            {
                "plain": partial(run_once, plain, streams, tokens),
                "tls": partial(run_once, secure, streams, tokens, made.client),
            },
            runs,
        )
    ratio = found["tls"].over(found["plain"])["services_us"]
    return {name: each.medians() for name, each in found.items()} | {"ratio": ratio}


async def measure_shapes(tokens: int, runs: int) -> Figures:
    """The figures of one stream with the tokenizer, then the engine too, inside the router."""
    with ExitStack() as meshes:
        turns: dict[str, Turn] = {
            each: partial(run_once, meshes.enter_context(stack(*STEP, shape=each)), 1, tokens)
            for each in get_args(Shape)
        }
        return {name: each.medians() for name, each in (await in_turn(turns, runs)).items()}


async def main(
    *,
    streams: tuple[int, ...] = (64, 256, 1000),
    tokens: int = 256,
    runs: int = 3,
    shapes: bool = False,
    tls: bool = False,
) -> Figures:
    """`shapes`: only one stream, by processes. `tls`: only TLS against plain text."""
    if tls:
        return {str(count): await measure_tls(count, tokens, runs) for count in streams}
    if shapes:
        return await measure_shapes(tokens, runs)
    paced = {}
    for count in streams:
        mesh = await measure(STEP_MS, count, tokens, runs)
        paced[str(count)] = mesh | {"floor": await measure_floor(count, tokens, runs)}
    flat_out = await measure(0, 64, FLAT_OUT_TOKENS, runs)
    return {"step_ms": STEP_MS, "streams": paced, "flat_out": flat_out}


if __name__ == "__main__":
    run_bench(main)
