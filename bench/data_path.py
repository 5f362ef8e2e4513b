"""What a streamed token costs: text through router, tokenizer and a simulated engine, by the native API.

Prints for 64, 256 and 1,000 streams at a 10 ms step, and for 64 streams flat out: inter-token latency and time to
first token at the client, tokens a second, and the CPU time of each process per token. Every token must arrive
exactly once, or the run fails.
"""

from __future__ import annotations

import trtmesh.chassis.environment  # noqa: F401, I001 - gRPC reads the environment when it is first imported

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from _stack import Stack, stack
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb
from trtmesh.v1 import router_pb2_grpc

PROMPT = "def fibonacci(n):\n    "
STEP_MS = 10
FLAT_OUT_TOKENS = 2048

Figures = dict[str, Any]


@dataclass(slots=True)
class Record:
    """What one stream saw: arrival times of its messages and the number of tokens."""

    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0


async def stream(
    stub: router_pb2_grpc.MeshServiceAsyncStub, max_tokens: int, record: Record
) -> None:
    """One request of one prompt. Raises SystemExit when a token is missing, doubled or out of order."""
    config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=max_tokens))
    item = router_pb.GenerateItem(prompt=pb.Prompt(text=PROMPT))
    request = router_pb.GenerateRequest(items=[item], config=config)
    record.started = time.perf_counter()
    finished = False
    async for response in stub.Generate(request):
        for event in response.events:
            kind = event.WhichOneof("event")
            if kind == "tokens":
                record.arrivals.append(time.perf_counter())
                if event.tokens.token_offset != record.tokens:
                    raise SystemExit(
                        f"token {event.tokens.token_offset} came instead of {record.tokens}"
                    )
                record.tokens += len(event.tokens.token_ids)
            elif kind == "item_failed":
                raise SystemExit(f"an item failed: {event.item_failed.error.message}")
            elif kind == "item_finished":
                finished = True
    if not finished or record.tokens != max_tokens:
        raise SystemExit(f"{record.tokens} of {max_tokens} tokens came")


async def run_once(mesh: Stack, streams: int, max_tokens: int) -> Figures:
    """`streams` requests at once; the figures of this run."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    records = [Record() for _ in range(streams)]
    async with grpc.aio.insecure_channel(mesh.address, options=options) as channel:
        await channel.channel_ready()
        stub: Any = router_pb2_grpc.MeshServiceStub(channel)
        before, client_before = mesh.cpu_seconds(), sum(os.times()[:2])
        started = time.perf_counter()
        await asyncio.gather(*(stream(stub, max_tokens, record) for record in records))
        seconds = time.perf_counter() - started
        client = sum(os.times()[:2]) - client_before
        after = mesh.cpu_seconds()
    cpu = {name: after[name] - before[name] for name in after} | {"client": client}
    return figures(records, seconds, cpu)


def figures(records: list[Record], seconds: float, cpu: dict[str, float]) -> Figures:
    """Latencies in milliseconds, CPU in microseconds per streamed token."""
    tokens = sum(record.tokens for record in records)
    gaps = [
        (later - earlier) * 1e3
        for record in records
        for earlier, later in zip(record.arrivals, record.arrivals[1:], strict=False)
    ]
    firsts = [(record.arrivals[0] - record.started) * 1e3 for record in records]
    services = sum(cpu[name] for name in ("router", "tokenizer", "engine"))
    return {
        "itl_p50_ms": round(percentile(gaps, 50), 2),
        "itl_p99_ms": round(percentile(gaps, 99), 2),
        "ttft_p50_ms": round(percentile(firsts, 50), 1),
        "tokens_per_second": round(tokens / seconds),
        "tokens_per_message": round(tokens / max(1, sum(len(r.arrivals) for r in records)), 2),
        "cpu_us_per_token": {name: round(used / tokens * 1e6, 1) for name, used in cpu.items()},
        "services_cpu_us_per_token": round(services / tokens * 1e6, 1),
    }


def percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0


async def measure(step_ms: float, streams: int, max_tokens: int, runs: int) -> Figures:
    """The run with the median CPU of the services, after one run to warm up."""
    with stack("--simulated-step-ms", str(step_ms)) as mesh:
        await run_once(mesh, min(streams, 64), 64)
        results = [await run_once(mesh, streams, max_tokens) for _ in range(runs)]
    results.sort(key=lambda result: result["services_cpu_us_per_token"])
    median: Figures = results[len(results) // 2]
    print(f"{streams} streams, step {step_ms:g} ms: {json.dumps(median)}", file=sys.stderr)
    return median


async def main(arguments: argparse.Namespace) -> None:
    paced = {
        str(streams): await measure(STEP_MS, streams, arguments.tokens, arguments.runs)
        for streams in arguments.streams
    }
    flat_out = await measure(0, 64, FLAT_OUT_TOKENS, arguments.runs)
    print(json.dumps({"step_ms": STEP_MS, "streams": paced, "flat_out": flat_out}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256, 1000])
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each paced stream")
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse()))
