"""The processes of a worker's other ranks."""

from __future__ import annotations

from contextlib import suppress

import psutil
from e2e.mesh import eventually
from fork_server import name_of
from forks import ForkServer
from processes import ServiceProcess, server_of
from trtmesh.engine.backends.torch.parallel.ranks import PROGRAM


def rank_server() -> ForkServer:
    """The server that forks the ranks of engines in this process."""
    return server_of("engine", ("--backend", "torch"))


def followers(pid: int | None = None) -> list[psutil.Process]:
    """The living ones of a process, by default those that this one has executed or had forked."""
    # Below this process may be a server that forks for other tests too.
    this = [*psutil.Process().children(), *rank_server().children()]
    found = []
    for child in psutil.Process(pid).children(recursive=True) if pid else this:
        with suppress(psutil.NoSuchProcess):
            if PROGRAM in child.cmdline() or child.name() == name_of(PROGRAM):
                found.append(child)
    return found


async def started(engine: ServiceProcess) -> psutil.Process:
    """The other rank of a worker that serves."""

    async def serves() -> bool:
        return "serves model" in engine.stderr

    await eventually(serves)
    (rank,) = followers(engine.pid)
    return rank


async def gone(process: psutil.Process) -> None:
    async def has_ended() -> bool:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE

    await eventually(has_ended)
