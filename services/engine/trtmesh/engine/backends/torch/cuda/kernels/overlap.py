"""Programmatic dependent launch: a kernel starts while the previous kernel of the stream still runs.

An overlapping kernel lets the next kernel start at once. The overlapping kernel loads only data that no kernel of a
step writes, such as weights, and waits before any other read or write. The wait ends with the previous kernel, which
has waited too, so all earlier kernels have ended.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

LEAST_CAPABILITY = (9, 0)


@cache
def overlap(device: torch.device, *, chained: bool = True) -> dict[str, Any]:
    """Options of the launch of a kernel with the parameter `overlaps`. One that is not `chained`, where streams part or
    meet, has more than a kernel before it, and begins after all of them."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    if chained and can:
        return {"overlaps": True, "launch_pdl": True}
    return {"overlaps": False}
