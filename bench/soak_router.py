"""Runs a mesh under churn: workers and tokenizers die, freeze, drain and return under mixed requests and cancels.

Rounds of faults and requests, each under a random policy, fill the given time. After each round no permit, booking,
handle, decode state, KV block or task may be left in any process, and every item not cancelled must equal its
fault-free result. The routers live on; the memory of the clients' router may not keep growing after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

# The faulty mesh is the tests' own.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chaos.faulty_mesh import FaultyMesh, Peer, faulty_mesh
from chaos.fragile import contents
from e2e.mesh import StreamReader, scrape
from trtmesh.client import Client
from trtmesh.router.placement import POLICIES

REQUESTS = 24
FAULTS = 3
ROUND_SECONDS = 2.0
"""Start of the last request and the last fault of a round."""
WARM_UP_PART = 0.5
GROWTH_BYTES = 8 * 2**20
"""Tolerated growth after the warm-up, between the medians of its two halves."""
PROMPTS = [f"{number} begins like the others" for number in range(8)]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 200},
    "sampled": {"max_tokens": 200, "temperature": 0.9, "seed": 3, "num_return_sequences": 2},
    "held": {"max_tokens": 100, "stream": False},
    "ids": {"max_tokens": 300, "text": False},
    "stops": {"max_tokens": 300, "stop_texts": ["th", "e"]},
}


@dataclass
class Soak:
    """The counts of the run."""

    mesh: FaultyMesh
    client: Client
    draw: random.Random
    expected: dict[str, list[Any]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    policies: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    cancelled: int = 0
    worst_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    async def learn(self) -> None:
        """Records the fault-free result of each kind of request."""
        for kind, options in KINDS.items():
            self.expected[kind] = contents(await self.client.complete(PROMPTS, **options))

    async def round(self) -> None:
        """Runs random requests and faults under a random policy, then waits for rest."""
        policy = self.draw.choice(sorted(POLICIES))
        self.policies[policy] += 1
        await self.mesh.set_policies([policy] * len(self.mesh.routers))
        # The first router is measured for the whole run.
        names = sorted(name for name in self.mesh.faults if "router" not in name)
        async with asyncio.TaskGroup() as group:
            for _ in range(FAULTS):
                group.create_task(self._suffer(self.draw.choice(names)))
            for _ in range(REQUESTS):
                group.create_task(self._request())
        await self.mesh.settle()

    async def _suffer(self, name: str) -> None:
        await asyncio.sleep(self.draw.uniform(0, ROUND_SECONDS))
        self.faults[name] += 1
        await self.mesh.suffer(name, self.draw)

    async def _request(self) -> None:
        await asyncio.sleep(self.draw.uniform(0, ROUND_SECONDS))
        kind, cancels = self.draw.choice(list(KINDS)), self.draw.random() < 0.3
        self.requests += 1
        reader = StreamReader(self.client, PROMPTS, **KINDS[kind])
        try:
            if cancels:
                self.cancelled += 1
                await asyncio.sleep(self.draw.uniform(0, 0.5))
                return
            found = contents(await reader.result())
            for got, expected in zip(found, self.expected[kind], strict=True):
                if got != expected:
                    self.wrong.append(f"an item ({kind}) came to {got} instead of {expected}")
            self.worst_seconds = max(self.worst_seconds, reader.worst_gap_seconds())
        finally:
            await reader.cancel()


@dataclass
class Sample:
    """The size of a process at a time of the run."""

    seconds: float
    resident_bytes: int
    tasks: int


async def measure(peer: Peer, seconds: float) -> Sample:
    resident = psutil.Process(peer.process.pid).memory_info().rss
    samples = await scrape(peer.process)
    return Sample(seconds, resident, int(samples["trtmesh_tasks"]))


def growth_bytes(samples: list[Sample]) -> int:
    """Growth after the warm-up, from the median of its first half to the median of its second."""
    warm = [s for s in samples if s.seconds >= WARM_UP_PART * samples[-1].seconds]
    if len(warm) < 2:
        return 0
    half = len(warm) // 2
    sizes = [s.resident_bytes for s in warm]
    return int(median(sizes[half:]) - median(sizes[:half]))


async def run(seconds: float, seed: int) -> int:
    async with faulty_mesh() as mesh, mesh.client(0) as client:
        soak = Soak(mesh, client, random.Random(seed))
        await soak.learn()
        started = time.monotonic()
        samples = []
        while not soak.wrong and (passed := time.monotonic() - started) < seconds:
            try:
                await soak.round()
            except* (AssertionError, TimeoutError) as errors:
                soak.wrong += [f"{type(e).__name__}: {e}" for e in errors.exceptions]
            sample = await measure(mesh.routers[0], passed)
            samples.append(sample)
            size = sample.resident_bytes / 2**20
            print(
                f"{passed:6.0f} s: {size:6.1f} MiB, {sample.tasks} tasks, {soak.requests} requests"
            )
        growth = growth_bytes(samples)
        if growth > GROWTH_BYTES:
            soak.wrong.append(f"the router grew by {growth / 2**20:.1f} MiB")
    figures = {
        "seconds": round(time.monotonic() - started),
        "rounds": len(samples),
        "requests": soak.requests,
        "cancelled": soak.cancelled,
        "faults": dict(soak.faults),
        "policies": dict(soak.policies),
        "worst_stall_ms": round(soak.worst_seconds * 1000),
        "resident_bytes": [samples[0].resident_bytes, samples[-1].resident_bytes],
        "tasks": [samples[0].tasks, samples[-1].tasks],
        "grown_bytes": growth,
        "wrong": soak.wrong,
    }
    print(json.dumps(figures))
    return 1 if soak.wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    sys.exit(asyncio.run(run(arguments.seconds, arguments.seed)))
