"""The ranks of a worker: processes of a host, for computing each step together, each a part of every layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOOPBACK = "127.0.0.1"
Store = Any
"""A `torch.distributed.Store`, which only some builds of PyTorch declare."""

TIMEOUT = timedelta(minutes=5)
"""For a rank without an answer. An ended rank is noticed at once, by the connections."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    rank: int
    ranks: int

    def part_of(self, size: int) -> slice:
        """The rank's part of `size` things, a multiple of `ranks`."""
        each = size // self.ranks
        return slice(self.rank * each, (self.rank + 1) * each)


class RankGroup:
    """The exchange between computing ranks. Each calls the same methods in the same order."""

    def __init__(self, store: Store, place: RankPlace, device: torch.device) -> None:
        """Waits for the other ranks; they find each other in `store`."""
        self.place = place
        self._device = device
        self._backend = _backend(store, place, device)
        self._releases: list[Callable[[], None]] = []

    def add(self, tensor: Tensor) -> Tensor:
        """Replaces a tensor by the sum over all ranks, with the same bits on each; returns the tensor."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def least(self, values: Iterable[int]) -> list[int]:
        """The lowest of all ranks, value by value."""
        given = torch.tensor([*values], dtype=torch.int64, device=self._device)
        lowest: list[int] = self._reduce(given, dist.ReduceOp.MIN).tolist()
        return lowest

    def wait(self) -> None:
        self.least([0])

    def share(self, tensor: Tensor) -> None:
        """Gives all ranks the first rank's content."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.asyncOp = False
        _finish(self._backend.broadcast([tensor], options))

    def abort(self) -> None:
        """Ends operations of a GPU waiting for a rank, from any thread. On a CPU no end is needed."""
        if self._device.type == "cuda":
            self._backend.abort()

    def release_first(self, release: Callable[[], None]) -> None:
        """Lets `close` call `release` before ending the group."""
        self._releases.append(release)

    def close(self) -> None:
        """Ends the group, whether the other ranks live or not. NCCL waits for the end of all graphs with captured
        operations, so these go first: the end of the interpreter destroys both in any order."""
        for release in self._releases:
            release()
        self._releases.clear()
        self.abort()

    def _reduce(self, tensor: Tensor, operation: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        # On the stream of the caller, for the right place in a captured step.
        options.asyncOp = False
        _finish(self._backend.allreduce([tensor], options))
        return tensor


def open_store(file: Path, ranks: int) -> Store:
    """The place where the ranks of a group find each other: a file in a folder that is there."""
    untyped: Any = dist
    return untyped.FileStore(str(file), ranks)


def _finish(work: Any) -> None:
    """Waits on a CPU; on a GPU the stream waits. Raises RuntimeError for an ended rank."""
    if work is not None:
        work.wait()


def _backend(store: Store, place: RankPlace, device: torch.device) -> Any:
    """Not the default group of the process: the default is global, and a process may have several engines."""
    # Untyped: builds of PyTorch differ.
    untyped: Any = dist
    if device.type == "cuda":
        options = untyped.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        group = untyped.ProcessGroupNCCL(store, place.rank, place.ranks, options)
        group.eager_connect_single_device(device)
        return group
    options = untyped.ProcessGroupGloo._Options()
    options._timeout = TIMEOUT
    options._devices = [untyped.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return untyped.ProcessGroupGloo(store, place.rank, place.ranks, options)
