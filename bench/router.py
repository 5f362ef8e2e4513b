"""Measures the gain of placement over 64 simulated workers: policies, one router and two.

Equal requests with one of many long prefixes under round_robin, prefix_aware and auto: TTFT, and share of prompt
tokens reused against an oracle that hits every prefix ever sent to any worker; also under prefix_aware through two
routers that receive twin requests at the same time. The workers live in one process (`_simulated_fleet.py`), each with
its own server and port. `scale` has the cost of a decision.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from _doors import NATIVE
from _load import Stream, connections
from _options import run_bench, tell
from _stack import routers, simulated_fleet
from _turns import Figures
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.tools.bench.figures import percentile

WORKERS = 64
BLOCK_TOKENS = 32
PREFIXES, PREFIX_BLOCKS, TAIL_TOKENS = 128, 32, 40
PREFILL_RATE = 20_000
FLEET = (
    *("--load-interval-seconds", "0.25"),
    *("--simulated-kv-cache-tokens-per-block", str(BLOCK_TOKENS)),
    *("--simulated-timing-prefill-tokens-per-second", str(PREFILL_RATE)),
)


@dataclass(slots=True)
class Seen:
    """The client's view of one request."""

    first_token_seconds: float
    cached_tokens: int


async def ask(connection: ClientConnection, prompt: Sequence[int], tokens: int) -> Seen:
    request, stream = NATIVE.request(prompt, tokens, text=False), Stream()
    await stream.receive(connection, NATIVE, request)
    NATIVE.check(stream.messages, tokens)
    return Seen(stream.first_seconds(NATIVE), NATIVE.cached(stream.messages))


async def shared_prefixes(
    engines: str, policy: str, requests: int, salt: int, count: int = 1
) -> Figures:
    """Sends requests with shared prefixes at a steady rate; each of `count` routers gets a twin of every request at the
    same time. `salt` makes the prompts of a run unique."""
    generator = random.Random(7)
    chosen = [generator.randrange(PREFIXES) for _ in range(requests // count)]
    requests = len(chosen) * count
    tokens = PREFIX_BLOCKS * BLOCK_TOKENS
    policies = ("--placement-policy", policy)
    with routers(engines, *policies, count=count, ready=WORKERS) as started:
        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(connections(router["address"], 1))
                for router in started
            ]
            tasks: list[asyncio.Task[Seen]] = []
            begun = time.perf_counter()
            for prefix in chosen:
                for (connection,) in opened:
                    tail = [20_000 + (len(tasks) + n) % 10_000 for n in range(TAIL_TOKENS)]
                    prompt = [1 + salt * PREFIXES + prefix] * tokens + tail
                    tasks.append(asyncio.create_task(ask(connection, prompt, 8)))
                await asyncio.sleep(max(0.0, begun + len(tasks) / 150 - time.perf_counter()))
            seen = await asyncio.gather(*tasks)
    prompt_tokens = requests * (tokens + TAIL_TOKENS)
    oracle = (requests - len(set(chosen))) * tokens / prompt_tokens
    hit_rate = sum(each.cached_tokens for each in seen) / prompt_tokens
    firsts = [each.first_token_seconds * 1e3 for each in seen]
    return {
        "hit_rate": round(hit_rate, 4),
        "of_oracle": round(hit_rate / oracle, 4),
        "ttft_mean_ms": round(statistics.fmean(firsts), 1),
        "ttft_p50_ms": round(statistics.median(firsts), 1),
        "ttft_p99_ms": round(percentile(firsts, 99), 1),
    }


async def main(*, requests: int = 2000) -> Figures:
    """`requests` of each policy's run."""
    policies: Figures = {}
    with simulated_fleet(WORKERS, "--simulated-timing-step-ms", "20", *FLEET) as (engines, _):
        for salt, policy in enumerate(("round_robin", "prefix_aware", "auto")):
            policies[policy] = await shared_prefixes(engines, policy, requests, salt)
            tell(policy, policies[policy])
        twins = await shared_prefixes(engines, "prefix_aware", requests, 3, count=2)
        policies["prefix_aware_of_two_routers"] = twins
    base = policies["round_robin"]["ttft_mean_ms"]
    for policy in ("prefix_aware", "auto"):
        policies[policy]["ttft_ratio"] = round(base / policies[policy]["ttft_mean_ms"], 2)
    return {"workers": WORKERS, "policies": policies}


if __name__ == "__main__":
    run_bench(main)
