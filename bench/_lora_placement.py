"""Placement of adapters: by replay's simulation, and by a router with simulated workers.

Zipf traffic of 200 adapters over 8 workers with 16 slots: loads per 1,000 requests and TTFT by policy. Mixed ranks: the
highest arrival rate with a p99 TTFT of at most a second, against the same policy without ranks.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from _stack import _end, _first_line, _start, wait_until_serving
from router import Seen, ask, samples
from trtmesh.router.placement import POLICIES, AdapterNeed, PlacementQuery
from trtmesh.router.placement.policies import Fleet, Policy
from trtmesh.router.placement.residency import AdapterOutlook
from trtmesh.tools.fleet_replay.fleet_model import FleetModel, ReplayResult
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import Arrival
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

WORKERS, SLOTS, ADAPTERS = 8, 16, 200
RANKS = (8, 16, 32, 64, 128)
LOAD_MS, STEP_MS = 300, 10
LONGEST_TTFT = 1.0
COMPARED = ("round_robin", "least_loaded", "lora_aware", "auto")

Figures = dict[str, Any]


def traffic(
    items: int,
    rate: float,
    ranks: Sequence[int] = (16,),
    exponent: float = 1.0,
    new_tokens: int = 64,
) -> list[Arrival]:
    """Arrivals of adapters with Zipf's popularity, at random times; a rank per adapter."""
    dice, now, arrivals = random.Random(3), 0.0, []
    weights = [number**-exponent for number in range(1, ADAPTERS + 1)]
    rank_of = [dice.choice(ranks) for _ in weights]
    for number in dice.choices(range(ADAPTERS), weights, k=items):
        now += dice.expovariate(rate)
        lengths = dice.randint(100, 300), dice.randint(new_tokens // 2, new_tokens * 3 // 2)
        arrivals.append(
            Arrival(now, *lengths, 32, (), adapter=str(number), adapter_rank=rank_of[number])
        )
    return arrivals


def percentile(seconds: Sequence[float], percent: int) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]


def ratios(by_policy: dict[str, Figures]) -> Figures:
    """The policies with adapters against those without."""
    aware, blind, least = (by_policy[p] for p in ("lora_aware", "round_robin", "least_loaded"))
    return {
        "loads_to_round_robin": round(aware["loads_per_1000"] / blind["loads_per_1000"], 3),
        "loads_to_least_loaded": round(aware["loads_per_1000"] / least["loads_per_1000"], 3),
        "ttft_p99_to_round_robin": round(aware["ttft_p99_ms"] / blind["ttft_p99_ms"], 3),
    }


def simulated(items: int) -> Figures:
    """Loads and TTFT in replay's simulation, without the first fifth, in which every adapter is new."""
    figures: Figures = {}
    for host in (SLOTS, 2 * SLOTS, 4 * SLOTS):
        model = FleetModel(WORKERS, host_adapters=host, delivery_seconds=LOAD_MS / 1000)
        arrivals, head = traffic(items, 40.0), traffic(items, 40.0)[: items // 5]
        by_policy = {}
        for policy in COMPARED:
            all_, first = replay(arrivals, policy, model), replay(head, policy, model)
            by_policy[policy] = _figures(all_, first)
        figures[f"host_adapters_{host}"] = by_policy | {"ratios": ratios(by_policy)}
    return figures


def _figures(outcome: ReplayResult, first: ReplayResult) -> Figures:
    items = outcome.items - first.items
    loads = outcome.adapter_deliveries - first.adapter_deliveries
    ttft = outcome.first_token_seconds[first.items :]
    return {
        "loads_per_1000": round(1000 * loads / items, 1),
        "ttft_p50_ms": round(percentile(ttft, 50) * 1e3, 1),
        "ttft_p99_ms": round(percentile(ttft, 99) * 1e3, 1),
    }


def fewest_loads() -> float:
    """Loads per 1,000 requests if the slots always held the most popular adapters, each on a single worker."""
    weights = [1 / number for number in range(1, ADAPTERS + 1)]
    return round(1000 * sum(weights[WORKERS * SLOTS :]) / sum(weights), 1)


def _without_rank(query: PlacementQuery) -> PlacementQuery:
    need = query.adapter
    if need is None:
        return query
    outlook = AdapterOutlook(delivery_seconds=need.outlook.delivery_seconds)
    return query._replace(adapter=AdapterNeed(need.adapter, 0, need.deliverable, outlook))


def rank_blind() -> Policy:
    """`lora_aware` without ranks and shares."""
    aware = POLICIES["lora_aware"]

    def costs(fleet: Fleet, query: PlacementQuery) -> list[float]:
        return aware.costs(fleet, _without_rank(query))

    def shortlist(eligible: list[int], fleet: Fleet, query: PlacementQuery) -> list[int]:
        return aware.shortlist(eligible, fleet, _without_rank(query))

    return Policy(costs, shortlist, aware.pick)


def mixed_ranks(items: int) -> Figures:
    """The highest arrival rate with a p99 TTFT of at most a second, in steps of 2 requests per second."""
    model = FleetModel(
        WORKERS,
        adapter_slots=32,
        host_adapters=ADAPTERS,
        delivery_seconds=0.1,
        max_batch_size=32,
        step_seconds_per_rank=0.0001,
    )
    POLICIES["rank_blind"] = rank_blind()
    try:
        return {
            policy: _highest_rate(policy, items, model)
            for policy in ("round_robin", "least_loaded", "rank_blind", "lora_aware")
        }
    finally:
        del POLICIES["rank_blind"]


def _highest_rate(policy: str, items: int, model: FleetModel) -> Figures:
    lowest, highest = 10, 110
    while highest - lowest > 2:
        rate = (lowest + highest) // 2
        outcome = replay(traffic(items, rate, RANKS, new_tokens=128), policy, model)
        meets = percentile(outcome.first_token_seconds[items // 5 :], 99) <= LONGEST_TTFT
        lowest, highest = (rate, highest) if meets else (lowest, rate)
    outcome = replay(traffic(items, 60.0, RANKS, new_tokens=128), policy, model)
    return {
        "requests_per_second": lowest,
        "ttft_mean_ms_at_60": round(statistics.fmean(outcome.first_token_seconds) * 1e3, 1),
    }


@contextmanager
def fleet(*flags: str) -> Iterator[str]:
    """Runs the workers and yields the router's --engines."""
    children: list[subprocess.Popen[str]] = []
    common = ["--simulated-timing-step-ms", str(STEP_MS), "--load-interval-seconds", "0.1"]
    common += ["--simulated-adapters-slots", str(SLOTS)]
    script = str(Path(__file__).with_name("_simulated_fleet.py"))
    try:
        line = _first_line(children, "fleet", [script, str(WORKERS), *common, *flags])
        yield ",".join(json.loads(line))
    finally:
        _end(children)


@contextmanager
def router(engines: str, policy: str) -> Iterator[dict[str, Any]]:
    children: list[subprocess.Popen[str]] = []
    flags = ("--port", "0", "--admin-port", "0", "--http-port", "none", "--metrics-port", "0")
    try:
        started: Any = _start(
            children, "router", *flags, "--placement-policy", policy, "--engines", engines
        )
        wait_until_serving(started["address"])
        while samples(started)["trtmesh_router_ready_workers"] < WORKERS:
            time.sleep(0.1)
        yield started
    finally:
        _end(children)


def request_of(arrival: Arrival, *, weights: bool) -> bytes:
    """A request by the adapter's number, with weights of the adapter's rank where it is new."""
    lora = pb.LoraConfig(id=int(arrival.adapter) + 1)
    if weights:
        shape, rank = [1, 1, 16], arrival.adapter_rank
        values = np.full(shape, lora.id, np.float16).tobytes()
        lora.weights.CopyFrom(pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=shape, data=values))
        columns = np.array([[[0, 0, rank]]], np.int32).tobytes()
        lora.config.CopyFrom(pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=[1, 1, 3], data=columns))
    config = pb.GenerationConfig(
        stopping=pb.StoppingConfig(max_tokens=arrival.new_tokens),
        output=pb.OutputConfig(text=False),
        lora=lora,
    )
    prompt = pb.Prompt(token_ids=pb.TokenIds(ids=[1 + n for n in range(arrival.prompt_tokens)]))
    item = router_pb.GenerateItem(prompt=prompt)
    return router_pb.GenerateRequest(items=[item], config=config).SerializeToString()


async def mesh(policy: str, arrivals: Sequence[Arrival], *flags: str) -> Figures:
    """Loads, TTFT and tokens per second of a router with simulated workers, all adapters known to the router."""
    with fleet(*flags) as engines, router(engines, policy) as started:
        async with grpc.aio.insecure_channel(started["address"]) as channel:
            generate: Any = channel.unary_stream("/trtmesh.v1.MeshService/Generate")
            known = {a.adapter: a for a in arrivals}.values()
            await asyncio.gather(
                *(ask(generate, request_of(replace(a, new_tokens=1), weights=True)) for a in known)
            )
            await _run(generate, arrivals[: len(arrivals) // 5])
            before, began = _loads(started), time.perf_counter()
            measured = arrivals[len(arrivals) // 5 :]
            seen = await _run(generate, measured)
            seconds, loads = time.perf_counter() - began, _loads(started) - before
    ttft = [each.first_token_seconds for each in seen]
    return {
        "loads_per_1000": round(1000 * loads / len(measured), 1),
        "ttft_p50_ms": round(percentile(ttft, 50) * 1e3, 1),
        "ttft_p99_ms": round(percentile(ttft, 99) * 1e3, 1),
        "ttft_mean_ms": round(statistics.fmean(ttft) * 1e3, 1),
        "tokens_per_second": round(sum(each.tokens for each in seen) / seconds),
    }


async def _run(generate: Any, arrivals: Sequence[Arrival]) -> list[Seen]:
    began, tasks = time.perf_counter() - arrivals[0].seconds, []
    for arrival in arrivals:
        await asyncio.sleep(max(0.0, began + arrival.seconds - time.perf_counter()))
        tasks.append(asyncio.create_task(ask(generate, request_of(arrival, weights=False))))
    return await asyncio.gather(*tasks)


def _loads(started: dict[str, Any]) -> float:
    return samples(started)["trtmesh_router_adapter_delivery_seconds_count"]


async def placement(items: int) -> Figures:
    """All figures of placement."""
    result: Figures = {"fewest_loads_per_1000": fewest_loads(), "simulated": simulated(items)}
    result["simulated_mixed_ranks"] = mixed_ranks(items // 4)
    print(json.dumps(result), file=sys.stderr)
    flags = "--simulated-adapters-host-adapters", "--simulated-adapters-load-ms"
    result["mesh"] = {}
    for host in (SLOTS, 4 * SLOTS):
        by_policy = {}
        for policy in COMPARED[:3]:
            arrivals = traffic(1500, 40.0)
            by_policy[policy] = await mesh(
                policy, arrivals, flags[0], str(host), flags[1], str(LOAD_MS)
            )
            print(f"{host} {policy}: {json.dumps(by_policy[policy])}", file=sys.stderr)
        result["mesh"][f"host_adapters_{host}"] = by_policy | {"ratios": ratios(by_policy)}
    ranked = ["--simulated-adapters-rank-step-ms", "0.2", "--simulated-adapters-slots", "32"]
    ranked += ["--simulated-limits-max-batch-size", "16"]
    result["mesh_mixed_ranks"] = {
        policy: await mesh(policy, traffic(1800, 90.0, RANKS, new_tokens=64), *ranked)
        for policy in ("least_loaded", "lora_aware")
    }
    return result
