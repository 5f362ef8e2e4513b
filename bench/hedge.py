"""Measures what second copies of late sequences save and cost.

Three simulated workers, and requests that arrive by chance at a share of what the workers can do: gaps between the
tokens of a stream and times to first tokens, without and with hedging, in turn and with equal arrivals, while

* `stall`: a worker is frozen for 2 s, again and again;
* `half`: a worker has half of the speed of the others;
* `bursts`: a fifth of the requests arrive at the start of each second;
* `even`: nothing happens.

Every stream must have the tokens of the same stream without hedging, or the run fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Annotated

from _doors import Native
from _load import Stream, connections, gaps_ms
from _options import run_bench, tell
from _stack import Fleet, fleet, samples
from _turns import Figures
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.tools.bench.figures import percentile
from trtmesh.v1 import router_pb2 as router_pb

WORKERS, BATCH, MOST_BATCH, PREFILL_RATE = 3, 16, 48, 20_000
"""A worker is at its capacity with BATCH sequences, where a step takes `step_ms`; it takes more, and gets slower."""
FIXED_SHARE = 0.6
"""Of such a step, whatever the batch."""
PROMPT_TOKENS, TOKENS = (64, 256), (32, 96)
"""Fewest and most of a request."""
STALL_SECONDS = 2.0
WARM_SECONDS = 3.0
BURST_SHARE = 0.2
FAULTS = ("stall", "half", "bursts", "even")
ENGINE = (
    *("--backend", "simulated"),
    *("--simulated-timing-prefill-tokens-per-second", str(PREFILL_RATE)),
    *("--simulated-limits-max-batch-size", str(MOST_BATCH)),
)
HALF = ("--simulated-faults-slow-after-steps", "1", "--simulated-faults-slow-factor", "2")
DOOR = Native()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it comes."""

    at: float
    prompt: Sequence[int]
    tokens: int


def capacity(step_ms: float) -> float:
    """Requests a second of all workers, if their batches were always full."""
    prompt, tokens = sum(PROMPT_TOKENS) / 2, sum(TOKENS) / 2
    # A prompt holds up the whole batch of its worker.
    seconds = tokens * step_ms / 1000 / BATCH + prompt / PREFILL_RATE
    return WORKERS / seconds


def _steps(step_ms: float) -> Sequence[str]:
    each = (1 - FIXED_SHARE) * step_ms / BATCH
    fixed = ("--simulated-timing-step-ms", str(FIXED_SHARE * step_ms))
    return (*fixed, "--simulated-timing-step-ms-per-sequence", str(each))


def arrivals(rate: float, seconds: float, *, bursts: bool) -> Iterator[Arrival]:
    """The same ones for each side."""
    draw, at = random.Random(1), 0.0
    while (at := at + draw.expovariate(rate)) < seconds:
        when = float(int(at)) if bursts and draw.random() < BURST_SHARE else at
        prompt = [draw.randrange(8, 32000) for _ in range(draw.randint(*PROMPT_TOKENS))]
        yield Arrival(when, prompt, draw.randint(*TOKENS))


async def send(
    connection: ClientConnection, arrival: Arrival, began: float, stream: Stream
) -> None:
    await asyncio.sleep(began + arrival.at - time.perf_counter())
    request = DOOR.request(arrival.prompt, arrival.tokens, text=False, ignore_end_id=True)
    await stream.receive(connection, DOOR, request)
    DOOR.check(stream.messages, arrival.tokens)


@asynccontextmanager
async def stalling(pid: int, period: float) -> AsyncIterator[None]:
    """Freezes a worker at the end of each period."""

    async def stall() -> None:
        while True:
            await asyncio.sleep(period - STALL_SECONDS)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(STALL_SECONDS)
            os.kill(pid, signal.SIGCONT)

    task = asyncio.create_task(stall())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        os.kill(pid, signal.SIGCONT)


async def side(
    fault: str, load: float, seconds: float, period: float, step_ms: float, *, hedged: bool
) -> tuple[Figures, list[list[int]]]:
    """One run: figures, and the tokens of each request."""
    ordinary = (*ENGINE, *_steps(step_ms))
    engines = [
        (*ordinary, *HALF) if fault == "half" and not n else ordinary for n in range(WORKERS)
    ]
    flags = ("--hedge-share", "0.02") if hedged else ()
    with fleet(engines, *flags) as mesh:
        planned = sorted(
            arrivals(load * capacity(step_ms), WARM_SECONDS + seconds, bursts=fault == "bursts"),
            key=lambda a: a.at,
        )
        streams = [Stream() for _ in planned]
        disturbed = stalling(mesh.engine_pids[0], period) if fault == "stall" else nullcontext()
        async with connections(mesh.address, 2) as both, disturbed:
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for number, (arrival, stream) in enumerate(zip(planned, streams, strict=True)):
                    group.create_task(send(both[number % 2], arrival, began, stream))
        measured = [
            stream
            for arrival, stream in zip(planned, streams, strict=True)
            if arrival.at >= WARM_SECONDS
        ]
        figures = {**_times(measured), **_costs(mesh)}
    return figures, [_tokens(stream) for stream in streams]


def _tokens(stream: Stream) -> list[int]:
    return [
        token
        for message in stream.messages
        for event in router_pb.GenerateResponse.FromString(message).events
        for token in event.tokens.token_ids
    ]


def _times(streams: Sequence[Stream]) -> Figures:
    gaps = gaps_ms(stream.arrivals(DOOR) for stream in streams)
    firsts = [stream.first_seconds(DOOR) * 1e3 for stream in streams]
    span = max(s.times[-1] for s in streams) - min(s.started for s in streams)
    found: Figures = {"requests_per_second": round(len(streams) / span, 1)}
    for name, values in (("gap", gaps), ("ttft", firsts)):
        for label, share in (("p50", 50), ("p99", 99), ("p99_9", 99.9), ("worst", 100)):
            found[f"{name}_{label}_ms"] = round(percentile(values, share), 1)
    return found


def _costs(mesh: Fleet) -> Figures:
    prefix, seen = "trtmesh_router_hedge", samples(mesh.router_metrics_port)
    delivered = seen["trtmesh_router_tokens_out_total"]
    wasted, copied = (seen[f"{prefix}_{name}_tokens_total"] for name in ("wasted", "copied"))
    refused = f"{prefix}s_refused_total"
    return {
        "extra_tokens_percent": round(100 * wasted / delivered, 2),
        "copied_tokens_percent": round(100 * copied / delivered, 2),
        "saved_seconds": round(seen[f"{prefix}_saved_seconds_total"], 1),
        "differences": seen[f"{prefix}_differences_total"],
        "refused": {
            name.removeprefix(refused): count
            for name, count in seen.items()
            if name.startswith(refused)
        },
    }


async def main(
    *,
    faults: Annotated[tuple[str, ...], FAULTS] = FAULTS,
    loads: tuple[float, ...] = (0.5, 0.7, 0.9),
    seconds: float = 60.0,
    period: float = 30.0,
    step_ms: float = 10.0,
) -> Figures:
    found: Figures = {}
    for fault in faults:
        for load in loads:
            name, timing = f"{fault} at {load:.0%}", (fault, load, seconds, period, step_ms)
            plain, expected = await side(*timing, hedged=False)
            hedged, tokens = await side(*timing, hedged=True)
            if tokens != expected:
                raise SystemExit(f"{name}: streams differ")
            found[name] = {"without": plain, "with": hedged}
            tell(name, found[name])
    return found


if __name__ == "__main__":
    run_bench(main)
