"""Measures a step of the torch engine with adapters, and the gaps of running streams while adapters load.

Times of steps are CPU time of the engine's thread, so that other processes hardly stretch them; use one thread.

`step`: the time of a step of 32 sequences with 1, 4, 16 and 32 adapters of rank 16 over the time with the base alone,
the median of rounds in which all take turns on one worker. `off`: the same without adapters on a worker that takes them
over one that does not. `gaps`: milliseconds between two steps of running streams without an adapter, alone and while 32
adapters of 8 to 64 MiB load.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from _engines import Prompts, Remote
from _models import SHAPES, build

SEQUENCES = 32
ADAPTERS = (1, 4, 16, 32)
RANK = 16
STREAMS = 8
LOADED_MIB = (8, 64)

Figures = dict[str, Any]


def prompts(vocabulary_size: int) -> Prompts:
    """Of 32 to 96 tokens, so that sequences of an adapter do not lie side by side."""
    dice = np.random.default_rng(1)
    lengths = dice.integers(32, 97, SEQUENCES)
    return [dice.integers(2, vocabulary_size, length).tolist() for length in lengths]


class Bench:
    """A model, and the workers that serve it."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._prompts = prompts(SHAPES[arguments.model]["vocab_size"])
        self._folder = folder / arguments.model
        if not self._folder.exists():
            build(self._folder, arguments.model)
        self._remotes: list[Remote] = []

    def worker(self, dtype: str, **adapters: int) -> Remote:
        remote = Remote()
        self._remotes.append(remote)
        remote.open(
            "Trtmesh", self._folder, dtype, self._arguments.threads,
            kv_cache={"prefix_reuse": False, "tokens": SEQUENCES * 512}, adapters=adapters,
        )  # fmt: skip
        return remote

    def end(self) -> None:
        for remote in self._remotes:
            remote.end()
        self._remotes = []

    def step(self, dtype: str) -> Figures:
        worker = self.worker(
            dtype, host_bytes=2**33, max_batch_adapters=max(ADAPTERS), max_rank=RANK
        )
        worker.call("load", [RANK] * max(ADAPTERS))
        times: dict[int, list[float]] = {count: [] for count in (0, *ADAPTERS)}
        for run in range(self._arguments.runs + 1):
            for count, found in times.items():
                numbers = [1 + place % count if count else 0 for place in range(SEQUENCES)]
                seconds = self._seconds(worker, numbers)
                if run:
                    found.append(seconds)
        return {
            "step_ms": {
                count: _median([1e3 * each for each in found]) for count, found in times.items()
            },
            "of_base": {count: _median(_quotients(times[count], times[0])) for count in ADAPTERS},
        }

    def off(self, dtype: str) -> float:
        """The time of a step on a worker that takes adapters, over one that does not."""
        workers = [self.worker(dtype), self.worker(dtype, host_bytes=2**33)]
        times: list[list[float]] = [[], []]
        for run in range(self._arguments.runs + 1):
            for worker, found in zip(workers, times, strict=True):
                seconds = self._seconds(worker, [0] * SEQUENCES)
                if run:
                    found.append(seconds)
        return _median(_quotients(times[1], times[0]))

    def gaps(self, dtype: str) -> Figures:
        """Percentiles of the time between two steps in milliseconds, alone and while adapters load."""
        most = LOADED_MIB[1] * 2**20
        worker = self.worker(dtype, host_bytes=2**32, max_adapter_bytes=2 * most, max_rank=256)
        mib_per_rank = worker.call("content_bytes", 64) / 64 / 2**20
        sizes = np.linspace(*LOADED_MIB, 32)
        ranks = [max(1, round(size / mib_per_rank)) for size in sizes]
        streams = self._prompts[:STREAMS]
        found: dict[str, list[float]] = {"alone": [], "loading": []}
        seconds = []
        for run in range(self._arguments.runs):
            found["alone"] += worker.call("gaps", streams, [])[0]
            while_loading, took = worker.call("gaps", streams, ranks, 1 + 32 * run)
            found["loading"] += while_loading
            seconds.append(took)
        total = sum(ranks) * mib_per_rank
        return {
            **{name: _percentiles(each) for name, each in found.items()},
            "loaded_mib_per_second": round(total / statistics.median(seconds)),
        }

    def _seconds(self, worker: Remote, numbers: list[int]) -> float:
        tokens = self._arguments.tokens
        seconds: float = worker.call("step_cpu_seconds", self._prompts, tokens, numbers)
        return seconds


def _quotients(times: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(times, others, strict=True)]


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _percentiles(seconds: list[float]) -> Figures:
    p50, p99, most = (float(value) for value in np.percentile(seconds, [50, 99, 100]))
    return {"p50": round(p50 * 1e3, 1), "p99": round(p99 * 1e3, 1), "max": round(most * 1e3, 1)}
