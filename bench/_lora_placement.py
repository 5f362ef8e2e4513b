"""Placement of adapters: by replay's simulation, and by a router with simulated workers.

Zipf traffic of 200 adapters over 8 workers with 16 slots: loads per 1,000 requests and TTFT by policy.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from _doors import NATIVE
from _load import ask, connections
from _options import tell
from _stack import Announcement, routers, samples, simulated_fleet
from _turns import Figures
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.tools.bench.figures import percentile
from trtmesh.tools.fleet_replay.fleet_model import FleetModel, ReplayResult
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import Arrival
from trtmesh.v1 import generation_pb2 as pb

WORKERS, SLOTS, ADAPTERS = 8, 16, 200
MESH_ITEMS = 1500
RANK = 16
LOAD_MS, STEP_MS = 300, 10
FLEET = (
    *("--simulated-timing-step-ms", str(STEP_MS), "--load-interval-seconds", "0.1"),
    *("--simulated-adapters-slots", str(SLOTS)),
)
COMPARED = ("round_robin", "least_loaded", "lora_aware", "auto")


def traffic(items: int, rate: float) -> list[Arrival]:
    """Arrivals of adapters with Zipf's popularity, at random times."""
    dice, now, arrivals = random.Random(3), 0.0, []
    weights = [1 / number for number in range(1, ADAPTERS + 1)]
    for number in dice.choices(range(ADAPTERS), weights, k=items):
        now += dice.expovariate(rate)
        lengths = dice.randint(100, 300), dice.randint(32, 96)
        arrivals.append(Arrival(now, *lengths, 32, (), adapter=str(number), adapter_rank=RANK))
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
    tell("simulated", result)
    load = ("--simulated-adapters-load-ms", str(LOAD_MS))
    result["mesh"] = {}
    for host in (SLOTS, 4 * SLOTS):
        by_policy = {}
        for policy in COMPARED[:3]:
            memory = ("--simulated-adapters-host-adapters", str(host))
            by_policy[policy] = await mesh(policy, traffic(MESH_ITEMS, 40.0), *memory, *load)
            tell(f"{host} {policy}", by_policy[policy])
        result["mesh"][f"host_adapters_{host}"] = by_policy | {"ratios": ratios(by_policy)}
    return result
