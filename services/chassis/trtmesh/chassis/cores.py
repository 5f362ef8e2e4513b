"""The number of cores."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Physical cores in this process's affinity mask, without hyperthreads."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.is_file() else cpu)
    return len(cores)
