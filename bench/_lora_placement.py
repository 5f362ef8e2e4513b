"""Placement of adapters: by replay's simulation, and by a router with simulated workers.

Zipf traffic of 200 adapters over 8 workers with 16 slots: loads per 1,000 requests and TTFT by policy. Mixed ranks: the
highest arrival rate with a p99 TTFT of at most a second, against the same policy without ranks.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from _doors import NATIVE
from _load import Figures, ask, connections
from _stack import Announcement, routers, samples, simulated_fleet
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.router.placement import POLICIES, AdapterNeed, PlacementQuery
from trtmesh.router.placement.policies import Fleet, Policy
from trtmesh.router.placement.residency import AdapterOutlook
from trtmesh.tools.bench.figures import percentile
from trtmesh.tools.fleet_replay.fleet_model import FleetModel, ReplayResult
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import Arrival
from trtmesh.v1 import generation_pb2 as pb

WORKERS, SLOTS, ADAPTERS = 8, 16, 200
RANKS = (8, 16, 32, 64, 128)
LOAD_MS, STEP_MS = 300, 10
LONGEST_TTFT = 1.0
FLEET = (
    *("--simulated-timing-step-ms", str(STEP_MS), "--load-interval-seconds", "0.1"),
    *("--simulated-adapters-slots", str(SLOTS)),
)
COMPARED = ("round_robin", "least_loaded", "lora_aware", "auto")


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


def request_of(arrival: Arrival, *, weights: bool) -> bytes:
    """A request by the adapter's number, with weights of the adapter's rank where it is new."""
    lora = pb.LoraConfig(id=int(arrival.adapter) + 1)
    if weights:
        shape, rank = [1, 1, 16], arrival.adapter_rank
        values = np.full(shape, lora.id, np.float16).tobytes()
        lora.weights.CopyFrom(pb.Tensor(data_type=pb.DATA_TYPE_FP16, shape=shape, data=values))
        columns = np.array([[[0, 0, rank]]], np.int32).tobytes()
        lora.config.CopyFrom(pb.Tensor(data_type=pb.DATA_TYPE_INT32, shape=[1, 1, 3], data=columns))
    ids = [1 + n for n in range(arrival.prompt_tokens)]
    return NATIVE.request(ids, arrival.new_tokens, text=False, lora=lora)


async def mesh(policy: str, arrivals: Sequence[Arrival], *flags: str) -> Figures:
    """Loads, TTFT and tokens per second of a router with simulated workers, all adapters known to the router."""
    policies = ("--placement-policy", policy)
    with (
        simulated_fleet(WORKERS, *FLEET, *flags) as (engines, _),
        routers(engines, *policies, ready=WORKERS) as (started,),
    ):
        async with connections(started["address"], 1) as (connection,):
            known = [replace(a, new_tokens=1) for a in {a.adapter: a for a in arrivals}.values()]
            await asyncio.gather(
                *(ask(connection, NATIVE, request_of(each, weights=True), 1) for each in known)
            )
            await _run(connection, arrivals[: len(arrivals) // 5])
            before, began = _loads(started), time.perf_counter()
            measured = arrivals[len(arrivals) // 5 :]
            ttft = await _run(connection, measured)
            seconds, loads = time.perf_counter() - began, _loads(started) - before
    return {
        "loads_per_1000": round(1000 * loads / len(measured), 1),
        "ttft_p50_ms": round(percentile(ttft, 50) * 1e3, 1),
        "ttft_p99_ms": round(percentile(ttft, 99) * 1e3, 1),
        "ttft_mean_ms": round(statistics.fmean(ttft) * 1e3, 1),
        "tokens_per_second": round(sum(each.new_tokens for each in measured) / seconds),
    }


async def _run(connection: ClientConnection, arrivals: Sequence[Arrival]) -> list[float]:
    began, tasks = time.perf_counter() - arrivals[0].seconds, []
    for arrival in arrivals:
        await asyncio.sleep(max(0.0, began + arrival.seconds - time.perf_counter()))
        asked = ask(connection, NATIVE, request_of(arrival, weights=False), arrival.new_tokens)
        tasks.append(asyncio.create_task(asked))
    return await asyncio.gather(*tasks)


def _loads(started: Announcement) -> float:
    return samples(started["metrics_port"])["trtmesh_router_adapter_delivery_seconds_count"]


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
