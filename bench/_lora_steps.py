"""Measures a step of the torch engine with adapters, and the gaps of running streams while adapters load.

Times of steps are CPU time of the engine's thread, so that other processes hardly stretch them; use one thread.

`step`: the time of a step of 32 sequences with 1, 4, 16 and 32 adapters of rank 16 over the time with the base alone,
the median of rounds in which all take turns on one worker. `off`: the same without adapters on a worker that takes them
over one that does not. `gaps`: milliseconds between two steps of running streams without an adapter, alone and while 32
adapters of 8 to 64 MiB load.
"""

from __future__ import annotations

import statistics
from functools import partial
from pathlib import Path

import numpy as np
from _engines import Prompts, Remote
from _models import SHAPES, build
from _turns import Figures, Values, in_turn
from trtmesh.tools.bench.figures import percentile

SEQUENCES = 32
ADAPTERS = (1, 4, 16, 32)
RANK = 16
STREAMS = 8
LOADED_MIB = (8, 64)


def prompts(vocabulary_size: int) -> Prompts:
    """Of 32 to 96 tokens, so that sequences of an adapter do not lie side by side."""
    dice = np.random.default_rng(1)
    lengths = dice.integers(32, 97, SEQUENCES)
    return [dice.integers(2, vocabulary_size, length).tolist() for length in lengths]


class Bench:
    """A model, and the workers that serve it."""

    def __init__(self, model: str, folder: Path, *, tokens: int, runs: int, threads: int) -> None:
        self._tokens, self._runs, self._threads = tokens, runs, threads
        self._prompts = prompts(SHAPES[model]["vocab_size"])
        self._folder = folder / model
        if not self._folder.exists():
            build(self._folder, model)
        self._remotes: list[Remote] = []

    async def measure(self, part: str, dtype: str) -> object:
        """`step`, `off` or `gaps`."""
        try:
            return await getattr(self, part)(dtype)
        finally:
            for remote in self._remotes:
                remote.end()
            self._remotes = []

    def _worker(self, dtype: str, **adapters: int) -> Remote:
        remote = Remote()
        self._remotes.append(remote)
        remote.open(
            "Trtmesh", self._folder, dtype, self._threads,
            kv_cache={"prefix_reuse": False, "tokens": SEQUENCES * 512}, adapters=adapters,
        )  # fmt: skip
        return remote

    async def step(self, dtype: str) -> Figures:
        worker = self._worker(
            dtype, host_bytes=2**33, max_batch_adapters=max(ADAPTERS), max_rank=RANK
        )
        worker.call("load", [RANK] * max(ADAPTERS))
        turns = {
            count: partial(
                self._turn,
                worker,
                [1 + place % count if count else 0 for place in range(SEQUENCES)],
            )
            for count in (0, *ADAPTERS)
        }
        found = await in_turn(turns, self._runs)
        return {
            "step_ms": {count: each.medians(3)["ms"] for count, each in found.items()},
            "of_base": {count: found[count].over(found[0])["ms"] for count in ADAPTERS},
        }

    async def off(self, dtype: str) -> float:
        """The time of a step on a worker that takes adapters, over one that does not."""
        workers = {"off": self._worker(dtype), "on": self._worker(dtype, host_bytes=2**33)}
        plain = [0] * SEQUENCES
        turns = {name: partial(self._turn, worker, plain) for name, worker in workers.items()}
        found = await in_turn(turns, self._runs)
        return float(found["on"].over(found["off"])["ms"])

    async def gaps(self, dtype: str) -> Figures:
        """Percentiles of the time between two steps in milliseconds, alone and while adapters load."""
        worker = self._worker(dtype, host_bytes=2**32, max_rank=256)
        mib_per_rank = worker.call("content_bytes", 64) / 64 / 2**20
        sizes = np.linspace(*LOADED_MIB, 32)
        ranks = [max(1, round(size / mib_per_rank)) for size in sizes]
        streams = self._prompts[:STREAMS]
        found: dict[str, list[float]] = {"alone": [], "loading": []}
        seconds = []
        for run in range(self._runs):
            found["alone"] += worker.call("gaps", streams, [])[0]
            while_loading, took = worker.call("gaps", streams, ranks, 1 + 32 * run)
            found["loading"] += while_loading
            seconds.append(took)
        total = sum(ranks) * mib_per_rank
        return {
            **{
                name: {
                    label: round(percentile(each, percent) * 1e3, 1)
                    for label, percent in (("p50", 50), ("p99", 99), ("max", 100))
                }
                for name, each in found.items()
            },
            "loaded_mib_per_second": round(total / statistics.median(seconds)),
        }

    def _turn(self, worker: Remote, numbers: list[int]) -> Values:
        return {"ms": 1e3 * worker.call("step_cpu_seconds", self._prompts, self._tokens, numbers)}
