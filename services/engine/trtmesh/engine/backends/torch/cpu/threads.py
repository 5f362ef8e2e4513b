"""How many threads an operation on the CPU takes."""

from __future__ import annotations

import os

import torch
from trtmesh.chassis.cores import physical_cores


def take_threads(told: int) -> None:
    """Takes `told`, or where that is 0 what OMP_NUM_THREADS says, as torch itself does, or else one for each core."""
    if told or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(told or physical_cores())
