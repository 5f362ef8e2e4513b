"""The processes of a worker's other ranks."""

from __future__ import annotations

from contextlib import suppress

import psutil
from trtmesh.engine.backends.torch.parallel.ranks import PROGRAM


def followers(pid: int | None = None) -> list[psutil.Process]:
    """The living ones of a process, by default this one."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if PROGRAM in child.cmdline():
                found.append(child)
    return found
