"""The number of threads of a CPU operation."""

from __future__ import annotations

import os

import torch
from trtmesh.chassis.cores import physical_cores


def take_threads(threads: int) -> None:
    """Sets `threads`; 0 means OMP_NUM_THREADS, as in torch itself, or one per physical core."""
    if threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads or physical_cores())
