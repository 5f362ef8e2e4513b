"""Runs a mesh under churn: workers and tokenizers die, freeze, drain and return under mixed requests and cancels.

Rounds of `tests/chaos/test_random_faults.py` fill the given time: random requests and faults, under the policies in
turn. After each round no permit, booking, handle, decode state, KV block or task may be left in any process, and every
item not cancelled must equal its fault-free result. The memory of the clients' router may not keep growing after the
warm-up.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil
from _options import options_of

# The faulty mesh is the tests' own, whose processes are forked from those of a run.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("TESTED_FORKS", tempfile.mkdtemp(prefix="trtmesh-forks-"))

from chaos.faulty_mesh import MIXED, Peer, faulty_mesh
from chaos.test_random_faults import policies_of, request, suffer
from e2e.mesh import scrape

REQUESTS, FAULTS, CANCELLED = 24, 3, 0.3
"""Of a round, and the share of requests that are cancelled."""
WARM_UP_PART = 0.5
GROWTH_BYTES = 8 * 2**20
"""Tolerated growth after the warm-up, between the medians of its two halves."""


@dataclass(frozen=True, slots=True)
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


async def main(*, seconds: float = 900.0, seed: int = 1) -> None:
    wrong, samples, worst_seconds = list[str](), list[Sample](), 0.0
    async with faulty_mesh(MIXED) as mesh, mesh.client(0) as client:
        # The first router is measured for the whole run.
        names = sorted(name for name in mesh.faults if "router" not in name)
        started = time.monotonic()
        while not wrong and (passed := time.monotonic() - started) < seconds:
            draw = random.Random(seed + len(samples))
            drawn = [request(draw) for _ in range(REQUESTS)]
            faults = draw.choices(names, k=FAULTS)
            try:
                await mesh.set_policies(policies_of(seed + len(samples)))
                stall = await suffer(mesh, draw, [client], drawn, faults, CANCELLED)
                worst_seconds = max(worst_seconds, stall)
                await mesh.settle()
            except* (AssertionError, TimeoutError) as errors:
                wrong += [f"{type(e).__name__}: {e}" for e in errors.exceptions]
            samples.append(await measure(mesh.routers[0], passed))
            size = samples[-1].resident_bytes / 2**20
            print(f"{passed:6.0f} s: {size:6.1f} MiB, {samples[-1].tasks} tasks", file=sys.stderr)
    if (growth := growth_bytes(samples)) > GROWTH_BYTES:
        wrong.append(f"the router grew by {growth / 2**20:.1f} MiB")
    figures = {
        "seconds": round(time.monotonic() - started),
        "requests": REQUESTS * len(samples),
        "faults": FAULTS * len(samples),
        "worst_stall_ms": round(worst_seconds * 1000),
        "resident_bytes": [samples[0].resident_bytes, samples[-1].resident_bytes],
        "tasks": [samples[0].tasks, samples[-1].tasks],
        "grown_bytes": growth,
        "wrong": wrong,
    }
    print(json.dumps(figures))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    # Proxies write to connections that are lost, which uvloop takes for an error.
    asyncio.run(main(**options_of(main)))
