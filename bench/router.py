"""Measures the cost and gain of placement over 64 simulated workers: policies, one router and two.

* `placement_us`: one decision over 64 workers for a prompt of 1,000 tokens by policy, in this process; and the router's
  own histogram while 2,000 streams ran.
* `policies`: equal requests with one of many long prefixes under round_robin, prefix_aware and auto: TTFT, and share of
  prompt tokens reused against an oracle that hits every prefix ever sent to any worker; also under prefix_aware through
  two routers that receive twin requests at the same time.
* `throughput`: tokens a second of 2,000 streams through one router process and through two.

The workers live in one process (`_simulated_fleet.py`), each with its own server and port.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from _doors import NATIVE
from _load import CONNECTIONS, Figures, Stream, connections, run_bench
from _stack import Announcement, routers, samples, simulated_fleet
from trtmesh.chassis.block_hashes import chain
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.router.kv_index import KvIndex
from trtmesh.router.placement import POLICIES, PlacementQuery, WorkerSnapshot, place
from trtmesh.tools.bench.figures import percentile

WORKERS = 64
STREAMS = 2000
BLOCK_TOKENS = 32
PREFIXES, PREFIX_BLOCKS, TAIL_TOKENS = 128, 32, 40
STEP_MS, PREFILL_RATE = 100, 20_000
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


def placement_us(rounds: int = 2000) -> Figures:
    """Median time of a decision over 64 workers with its index lookup, and of hashing its prompt."""
    generator = random.Random(1)
    index = KvIndex(1_000_000)
    prompts = [[number] * 1000 for number in range(64)]
    chains = [chain(0, prompt, BLOCK_TOKENS) for prompt in prompts]
    for number, hashes in enumerate(chains):
        for holder in (number, (number * 7 + 1) % WORKERS):
            index.store(str(holder), hashes)
    workers = [
        WorkerSnapshot(
            str(n), f"w{n}", "m", "", frozenset({"stopping.max_tokens"}), last_turn=n,
            sequences=n % 5, wait_seconds=n % 5 / 100, prefill_seconds=5e-5, step_seconds=0.02,
        )
        for n in range(WORKERS)
    ]  # fmt: skip
    figures: Figures = {}
    for policy in POLICIES:
        times = []
        for turn in range(rounds):
            hashes = chains[turn % 64]
            started = time.perf_counter()
            found = index.match(hashes, 0.0) if POLICIES[policy].looks_at_prefixes else {}
            query = PlacementQuery(
                "m",
                frozenset({"stopping.max_tokens"}),
                prompt_tokens=1000,
                new_tokens=100,
                cached_tokens={name: blocks * BLOCK_TOKENS for name, blocks in found.items()},
                draw=generator.getrandbits(32),
            )
            place(policy, workers, query)
            times.append(time.perf_counter() - started)
        figures[policy] = microseconds(times)
    lookups, hashing = [], []
    for turn in range(rounds):
        started = time.perf_counter()
        index.match(chains[turn % 64], 0.0)
        middle = time.perf_counter()
        chain(0, prompts[turn % 64], BLOCK_TOKENS)
        lookups.append(middle - started)
        hashing.append(time.perf_counter() - middle)
    return figures | {
        "lookup_of_1000_tokens": microseconds(lookups),
        "hashing_of_1000_tokens": microseconds(hashing),
    }


def microseconds(times: Sequence[float]) -> float:
    return round(statistics.median(times) * 1e6, 1)


def router_placement_us(router: Announcement) -> float:
    """Median of the router's own histogram, as the upper bound of its bucket."""
    found = samples(router["metrics_port"])
    name = "trtmesh_router_placement_seconds_bucket"
    buckets = {float(key[len(name) :]): v for key, v in found.items() if key.startswith(name)}
    half = max(buckets.values()) / 2
    return round(min(bound for bound, total in buckets.items() if total >= half) * 1e6, 1)


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


async def throughput(engines: str, count: int, tokens: int) -> Figures:
    """Runs 2,000 streams at once, divided among the routers."""
    policies = ("--placement-policy", "auto")
    with routers(engines, *policies, count=count, ready=WORKERS) as started:
        async with AsyncExitStack() as stack:
            opened = [
                await stack.enter_async_context(connections(router["address"], CONNECTIONS))
                for router in started
            ]
            begun = time.perf_counter()
            await asyncio.gather(
                *(
                    ask(opened[n % count][n // count % CONNECTIONS], [n % 30_000 + 1] * 64, tokens)
                    for n in range(STREAMS)
                )
            )
            seconds = time.perf_counter() - begun
            medians = [router_placement_us(each) for each in started]
    return {
        "tokens_per_second": round(STREAMS * tokens / seconds),
        "placement_us_at_most": max(medians),
    }


async def main(*, requests: int = 2000, tokens: int = 48) -> None:
    """`requests` of each policy's run, and `tokens` of each of 2,000 streams."""
    result: Figures = {"workers": WORKERS, "placement_us": placement_us()}
    print(json.dumps(result["placement_us"]), file=sys.stderr)
    with simulated_fleet(WORKERS, "--simulated-timing-step-ms", "20", *FLEET) as (engines, _):
        result["policies"] = {}
        for salt, policy in enumerate(("round_robin", "prefix_aware", "auto")):
            figures = await shared_prefixes(engines, policy, requests, salt)
            print(f"{policy}: {json.dumps(figures)}", file=sys.stderr)
            result["policies"][policy] = figures
        figures = await shared_prefixes(engines, "prefix_aware", requests, 3, count=2)
        print(f"prefix_aware, two routers: {json.dumps(figures)}", file=sys.stderr)
        result["policies"]["prefix_aware_of_two_routers"] = figures
    base = result["policies"]["round_robin"]["ttft_mean_ms"]
    for policy in ("prefix_aware", "auto"):
        aware = result["policies"][policy]
        aware["ttft_ratio"] = round(base / aware["ttft_mean_ms"], 2)
    step = ("--simulated-timing-step-ms", str(STEP_MS))
    with simulated_fleet(WORKERS, *step, *FLEET) as (engines, _):
        result["throughput"] = {}
        for count in (1, 2):
            figures = await throughput(engines, count, tokens)
            print(f"{count} routers: {json.dumps(figures)}", file=sys.stderr)
            result["throughput"][str(count)] = figures
    print(json.dumps(result))


if __name__ == "__main__":
    run_bench(main)
