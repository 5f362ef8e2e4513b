"""Measures how soon the engine's KV blocks are free after a client's cancel, with other streams running.

Prints, for the simulated backend at a 10 ms step and for the torch backend with the demo model, the time from the
client's cancel to the engine's own count of used blocks without the request's, in milliseconds. The count is read
from the engine's metrics, which are refreshed every 2 ms here and cost a few milliseconds to read: the figures are
upper bounds.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import aclosing
from typing import Any

from _load import PROMPT
from _options import run_bench, tell
from _stack import MODEL_DIR, Stack, samples, stack
from trtmesh.client import Client, Tokens
from trtmesh.tools.bench.figures import percentile

GAUGE = "trtmesh_engine_used_blocks"
MAX_TOKENS = 50
# A block is longer than any sequence here, so a used block is a live sequence.
COMMON = ("--metrics-port", "0", "--load-interval-seconds", "0.002")
BACKENDS = {
    "simulated": (
        "--simulated-kv-cache-tokens-per-block",
        "4096",
        "--simulated-timing-step-ms",
        "10",
    ),
    "torch": ("--torch-kv-cache-tokens-per-block", "64", "--model-dir", str(MODEL_DIR)),
}


def used_blocks(mesh: Stack) -> int:
    return int(samples(mesh.engine_metrics_port)[GAUGE])


async def background(client: Client, ready: asyncio.Event) -> None:
    """Runs one stream after another until cancelled."""
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_end_id": True}
    while True:
        async with aclosing(client.generate([PROMPT], **options)) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    ready.set()


async def cancel_one(mesh: Stack, client: Client, streams: int) -> float:
    """Cancels a running request and returns the milliseconds until its blocks are free."""
    # Several prompts, so that a restarting background stream does not hide the change.
    prompts = ["class Stack:"] * 4
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_end_id": True}
    async with aclosing(client.generate(prompts, **options)) as events:
        async for event in events:
            if isinstance(event, Tokens):
                break
        started = time.perf_counter()
    while await asyncio.to_thread(used_blocks, mesh) > streams:
        pass
    return (time.perf_counter() - started) * 1e3


async def measure(backend: str, streams: int, rounds: int) -> dict[str, float]:
    with stack(*COMMON, *BACKENDS[backend], backend=backend) as mesh:
        async with Client(mesh.address) as client:
            ready = [asyncio.Event() for _ in range(streams)]
            lanes = [asyncio.create_task(background(client, event)) for event in ready]
            try:
                await asyncio.gather(*(event.wait() for event in ready))
                times = [await cancel_one(mesh, client, streams) for _ in range(rounds)]
            finally:
                for lane in lanes:
                    lane.cancel()
                await asyncio.gather(*lanes, return_exceptions=True)
    return {
        "p50_ms": round(statistics.median(times), 1),
        "p99_ms": round(percentile(times, 99), 1),
        "worst_ms": round(max(times), 1),
    }


async def main(*, streams: int = 16, rounds: int = 200) -> dict[str, object]:
    """`streams` go on meanwhile."""
    figures = {}
    for backend in BACKENDS:
        figures[backend] = await measure(backend, streams, rounds)
        tell(backend, figures[backend])
    return {"streams": streams, "cancels": rounds, **figures}


if __name__ == "__main__":
    run_bench(main)
