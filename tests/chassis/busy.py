"""Work that keeps the event loop from everything else."""

from __future__ import annotations

from time import perf_counter


def keep_busy(seconds: float) -> None:
    ends = perf_counter() + seconds
    while perf_counter() <= ends:
        pass
