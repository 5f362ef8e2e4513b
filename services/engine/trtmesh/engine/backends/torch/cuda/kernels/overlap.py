"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

A kernel that overlaps lets the next one start at once. It loads what no kernel of a step writes, such as weights, and
waits before it reads or writes anything else. The wait is for the end of the kernel before, which has itself waited, so
everything earlier has ended too.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

LEAST_CAPABILITY = (9, 0)


@cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Options of the launch of a kernel with the parameter `overlaps`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY:
        return {"overlaps": True, "launch_pdl": True}
    return {"overlaps": False}
