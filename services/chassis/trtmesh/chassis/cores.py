"""The cores of this process, and how many of them a model uses."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

BYTES_PER_THREAD = 100_000_000
"""Weights for each thread. The demo's streams are faster in one thread than in two, on an idle machine and much more so
beside other processes (`bench/history.md`, busy machine)."""


def threads_for(weights: int, cores: int) -> int:
    """Returns the threads of an engine by `cores` and bytes of weights. Independent of the present load: two engines
    agree to the last bit with equal threads only."""
    return max(1, min(cores, weights // BYTES_PER_THREAD))


def weight_bytes(model_dir: Path) -> int:
    """Bytes of the safetensors files of a directory."""
    return sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))


def physical_cores() -> int:
    """Physical cores in this process's affinity mask, without hyperthreads, within its cgroup's quota."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else cpu)
    return max(1, math.ceil(min(len(cores), granted_cores())))


def granted_cores(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> float:
    """Returns the cores granted by the cgroups of this process: infinite without a limit."""
    groups = own_cgroups(root, own)
    return min((_quota(each / "cpu.max") for each in groups), default=math.inf)


def own_cgroups(root: Path = CGROUPS, own: Path = OWN_CGROUP) -> Sequence[Path]:
    """The cgroup of this process, and those around it up to `root`."""
    names = own.read_text().splitlines() if own.is_file() else []
    path = next((name.removeprefix("0::/") for name in names if name.startswith("0::/")), "")
    group = root / path
    return (group, *group.parents[: len(group.relative_to(root).parts)])


def _quota(limit: Path) -> float:
    if not limit.is_file():
        return math.inf
    quota, period = limit.read_text().split()
    return math.inf if quota == "max" else int(quota) / int(period)
