"""Measures what a router pays for many workers: in replays of 1,000 behind 8 routers, and before 256 real ones.

* `replay`: 1,000 workers in virtual time under loads with the laws of Mooncake's conversations and of Azure's chats of
  2023, behind 8 routers and behind one: prefixes reused, and what a router gets and keeps of KV events.
* `decisions`: function calls and CPU of a placement over 1 to 10,000 workers.
* `routers`: four routers before 1, 64 and 256 workers of one process (`_simulated_fleet.py`), over real sockets: the
  CPU of a router's start, of a request, of a second without any, of a worker that leaves and joins again, and memory.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Annotated

from _doors import NATIVE
from _load import ask, at_once, connections
from _options import run_bench, tell
from _stack import Announcement, cpu_seconds, routers, samples, simulated_fleet
from _turns import Figures
from trtmesh.client import AdminClient
from trtmesh.router.kv_index import KvIndex
from trtmesh.router.placement import PlacementQuery, WorkerSnapshot, place
from trtmesh.tools.fleet_replay.fleet_model import FleetModel
from trtmesh.tools.fleet_replay.simulation import replay
from trtmesh.tools.fleet_replay.trace import MOONCAKE_BLOCK_TOKENS, Arrival
from trtmesh.v1 import engine_pb2 as pb

WORKERS, ROUTERS = 1000, 8
TURN_SECONDS = 3.0
"""Mean time from a turn of a conversation to the next, shorter than people's as a replay lasts a minute."""
FLEETS = (1, 64, 256)


def lognormal(dice: random.Random, mean: float, median: float, most: int) -> int:
    sigma = math.sqrt(2 * math.log(mean / median))
    return max(1, min(most, round(dice.lognormvariate(math.log(median), sigma))))


def mooncake(items: int, rate: float) -> Iterator[Arrival]:
    """Conversations of 12,035 prompt and 343 new tokens on average; turns repeat what was said, 40 % of all blocks."""
    dice, now, names = random.Random(1), 0.0, count()
    talks: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(items):
        said: tuple[int, ...] = ()
        ready = talks[0][0] <= now if talks else False
        if ready and dice.random() < 0.75:
            said = talks.pop(0)[1]
        size = lognormal(dice, 7200, 4000, 126_000) // MOONCAKE_BLOCK_TOKENS + 1
        blocks = (*said, *(next(names) for _ in range(size)))[:240]
        talks.append((now + TURN_SECONDS * dice.random() * 2, blocks))
        new = lognormal(dice, 343, 300, 2000)
        yield Arrival(
            now, len(blocks) * MOONCAKE_BLOCK_TOKENS + 9, new, MOONCAKE_BLOCK_TOKENS, blocks
        )
        now += dice.expovariate(rate)


def azure(items: int, rate: float) -> Iterator[Arrival]:
    """Chats of 1,155 prompt and 211 new tokens on average, medians 928 and 129, without known prefixes."""
    dice, now = random.Random(2), 0.0
    for _ in range(items):
        prompt, new = lognormal(dice, 1155, 928, 14_000), lognormal(dice, 211, 129, 1000)
        yield Arrival(now, prompt, new, MOONCAKE_BLOCK_TOKENS, ())
        now += dice.expovariate(rate)


LAWS = {"mooncake": (mooncake, 300.0), "azure": (azure, 1500.0)}
"""With items per second of 1,000 workers."""


def replays(items: int) -> Figures:
    figures: Figures = {}
    hashes = [random.Random(3).getrandbits(64)]
    event = pb.KvEvent(stored=pb.KvBlocksStored(block_hashes=hashes))
    block_bytes = pb.KvBlocksStored(block_hashes=hashes * 2).ByteSize() - event.stored.ByteSize()
    event_bytes = (
        pb.KvEvents(events=[event] * 2).ByteSize() - pb.KvEvents(events=[event]).ByteSize()
    )
    for name, (make, rate) in LAWS.items():
        arrivals = [*make(items, rate)]
        for many in (1, ROUTERS):
            model = FleetModel(workers=WORKERS, routers=many, report_seconds=1.0)
            begun = time.process_time()
            result = replay(arrivals, "auto", model)
            sent = (
                result.kv_events * (event_bytes - block_bytes)
                + result.kv_event_blocks * block_bytes
            )
            figures[f"{name}, {many} routers"] = {
                "items": items,
                "items_per_second": rate,
                "hit_rate": round(result.hit_rate, 4),
                "unbounded_hit_rate": round(result.reusable_tokens / result.prompt_tokens, 4),
                "balance": round(result.balance, 2),
                "ttft_p50_ms": round(1000 * statistics.median(result.first_token_seconds)),
                "kv_events_per_second": round(result.kv_events / result.seconds),
                "kv_blocks_per_second": round(result.kv_event_blocks / result.seconds),
                "kv_bytes_per_second_of_a_router": round(sent / result.seconds),
                "index_blocks": result.index_blocks,
                "index_bytes": result.index_bytes,
                "cpu_seconds": round(time.process_time() - begun, 1),
            }
            tell(f"{name}, {many} routers", figures[f"{name}, {many} routers"])
        one, eight = (figures[f"{name}, {many} routers"] for many in (1, ROUTERS))
        if one["hit_rate"]:
            eight["of_one_router"] = round(eight["hit_rate"] / one["hit_rate"], 4)
    return figures


def calls_of(work: Callable[[], object]) -> int:
    """Functions called, of Python and of C."""
    calls = 0

    def seen(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def decisions(rounds: int = 200) -> Figures:
    """A placement with the look-up of a prompt of 32 blocks that two workers have."""
    figures: Figures = {}
    for workers in (1, 64, 256, 1000, 10_000):
        fleet = [
            WorkerSnapshot(
                str(n), f"w{n}", "m", "", frozenset(), last_turn=n, sequences=n % 5,
                wait_seconds=n % 5 / 100, prefill_seconds=1e-4, step_seconds=0.02,
            )
            for n in range(workers)
        ]  # fmt: skip
        index, blocks = KvIndex(), [*range(1, 33)]
        for holder in {0, workers - 1}:
            index.store(str(holder), blocks)

        def decide(fleet: Sequence[WorkerSnapshot], index: KvIndex) -> None:
            cached = {name: 32 * blocks for name, blocks in index.match(blocks, 0.0).items()}
            place(
                "auto",
                fleet,
                PlacementQuery("m", prompt_tokens=1030, new_tokens=100, cached_tokens=cached),
            )

        work = partial(decide, fleet, index)
        work()
        begun = time.process_time()
        for _ in range(rounds):
            work()
        spent = (time.process_time() - begun) / rounds
        figures[str(workers)] = {"calls": calls_of(work), "cpu_us": round(spent * 1e6, 1)}
    return figures


async def measure_routers(many: int, requests: int, changes: int) -> Figures:
    figures: Figures = {}
    for workers in FLEETS:
        with (
            simulated_fleet(workers, "--simulated-timing-step-ms", "5") as (engines, fleet),
            routers(engines, count=many, ready=workers, tokenizer=True) as started,
        ):
            figures[str(workers)] = await routers_before(
                engines, fleet, started[:many], requests, changes
            )
        tell(f"{workers} workers", figures[str(workers)])
    for more in map(str, FLEETS[1:]):
        figures[f"{more}_over_1"] = {
            name: round(value / figures["1"][name], 2)
            for name, value in figures[more].items()
            if figures["1"].get(name)
        }
    return figures


async def routers_before(
    engines: str, fleet: int, started: Sequence[Announcement], requests: int, changes: int
) -> Figures:
    """Means of the routers, and the idle time of the process of the workers, `fleet`, which needs as much of a core as
    it says, and the routers theirs, for none to be found silent; only the first router's fleet is changed."""
    pids = [each["pid"] for each in started]
    used = [cpu_seconds(pid) for pid in pids]
    figures: Figures = {"start_cpu_ms": round(1e3 * statistics.fmean(used))}
    await asyncio.sleep(2)
    used, of_fleet = [cpu_seconds(pid) for pid in pids], cpu_seconds(fleet)
    await asyncio.sleep(4)
    idle = statistics.fmean(cpu_seconds(pid) - u for pid, u in zip(pids, used, strict=True)) / 4
    figures["idle_cpu_us_per_second"] = round(1e6 * idle)
    figures["idle_fleet_cpu_us_per_second"] = round(1e6 * (cpu_seconds(fleet) - of_fleet) / 4)
    costs, places = [], []
    request = NATIVE.request([1, 2, 3], 1, text=False)
    for router in started:
        async with connections(router["address"], 4) as opened:
            calls = [partial(ask, opened[n % 4], NATIVE, request, 1) for n in range(16)]
            await at_once(calls, 16)
            seen, before, begun = (
                samples(router["metrics_port"]),
                cpu_seconds(router["pid"]),
                time.monotonic(),
            )
            await at_once(calls, requests)
            spent = cpu_seconds(router["pid"]) - before - idle * (time.monotonic() - begun)
            after = samples(router["metrics_port"])
        costs.append(spent / requests)
        sums = (after[f"trtmesh_router_placement_seconds_{part}"] - seen[f"trtmesh_router_placement_seconds_{part}"]
                for part in ("sum", "count"))  # fmt: skip
        total, number = sums
        places.append(total / number)
    figures["request_cpu_us"] = round(1e6 * statistics.fmean(costs))
    figures["placement_us"] = round(1e6 * statistics.median(places), 1)
    figures["rss_mib"] = round(statistics.fmean(rss_mib(pid) for pid in pids), 1)
    if "," in engines:
        figures["change_cpu_us"] = await change_cpu_us(
            started[0], engines.split(",", maxsplit=1)[0], changes, idle
        )
    return figures


async def change_cpu_us(router: Announcement, address: str, changes: int, idle: float) -> int:
    """Of a worker that is removed and added again."""
    async with AdminClient(router["admin_address"]) as admin:
        before, begun = cpu_seconds(router["pid"]), time.monotonic()
        for _ in range(changes):
            await admin.remove_worker(address)
            await admin.add_worker(address)
        spent = cpu_seconds(router["pid"]) - before - idle * (time.monotonic() - begun)
    return round(1e6 * spent / changes)


def rss_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


PARTS = ("replay", "decisions", "routers")


async def main(
    *,
    parts: Annotated[tuple[str, ...], PARTS] = PARTS,
    items: int = 15_000,
    routers: int = 4,
    requests: int = 400,
    changes: int = 20,
) -> Figures:
    """`items` of a replay; `routers` before each fleet, `requests` of each, and `changes` of the first one's fleet."""
    results: Figures = {}
    if "decisions" in parts:
        results["decisions"] = decisions()
    if "routers" in parts:
        results["routers"] = await measure_routers(routers, requests, changes)
    if "replay" in parts:
        results["replay"] = await asyncio.to_thread(replays, items)
    return results


if __name__ == "__main__":
    run_bench(main)
