"""Faults of a handoff that is held at a step."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from chaos.damage import damaged_pools
from chaos.full_pool import full_pool
from chaos.handoff_mesh import ROUTERS, HandoffMesh
from chaos.handoff_steps import PREFILLING, Held
from chaos.proxy import Lane, Link
from e2e.mesh import eventually, scrape
from processes import ServiceProcess

KILLS = ("kill sender", "kill receiver", "kill router")
FREEZES = ("freeze sender", "freeze receiver", "freeze router")
CUTS = ("cut router-sender", "cut router-receiver", "cut receiver-sender")
SILENCES = ("silence router-sender", "silence router-receiver", "silence receiver-sender")
DAMAGE = "damage"
FULL = ("fill sender", "fill receiver")
CLIENT = ("stop", "cancel", "disconnect", "deadline")
"""The client, not the mesh, ends the request."""

FAULTS = (*KILLS, *FREEZES, *CUTS, *SILENCES, DAMAGE, *FULL, *CLIENT)

FOUND = ("a part of the KV arrived damaged", "is not that of the sequence's tokens")
"""What a router logs of a checksum that differs, and of damage that a worker meets in its own memory."""
LATE = (
    " for longer than ",
    "the lease was not renewed in time",
    "names a lease that is not held here",
    "is left: it was silent for",
)
"""What a router logs of a stage that took too long."""


def can_happen(fault: str, step: str) -> bool:
    """Whether a fault means anything at a step: bytes move at some only."""
    return fault != DAMAGE or step in (PREFILLING, "transferring")


@asynccontextmanager
async def struck(held: Held, fault: str) -> AsyncIterator[list[Lane]]:
    """Causes a fault; ends it with the block. Yields the lanes that are silent until then."""
    mesh = held.mesh
    kind, _, target = fault.partition(" ")
    match kind:
        case "kill":
            async with killed(mesh, name_of(held, target)):
                yield []
        case "freeze" if target == "router":
            async with frozen(mesh, name_of(held, target)):
                await _no_leases(mesh)
            yield []
        case "freeze":
            async with frozen(mesh, name_of(held, target)):
                yield []
        case "cut":
            with cut(link_of(held, target)):
                yield []
        case "silence":
            with silent(link_of(held, target)) as lanes:
                yield lanes
        case "damage":
            async with damaged(held):
                yield []
        case "fill":
            async with full_pool(mesh.process(name_of(held, target)).address):
                yield []
        case _:
            yield []


@asynccontextmanager
async def damaged(held: Held) -> AsyncIterator[None]:
    """Damages the KV on its way: in a message, or in the memory that the receiver reads. Checks that it was found."""
    mesh = held.mesh
    sender = mesh.process(held.sender)
    if mesh.transport == "grpc":
        mesh.workers[held.sender].fetch_link(held.receiver).from_target.damage_data()
        yield
    else:
        if held.receiver != held.sender:
            await held.until_true(lambda: is_idle(sender))
        with damaged_pools(sender.pid):
            yield
    # On a slow machine the handoff may end before anyone reads the damage, or before it is done.
    log = held.router_log
    assert any(words in log for words in (*FOUND, *LATE)), f"nobody saw the damage: {log}"


async def is_idle(worker: ServiceProcess) -> bool:
    """Whether a worker has left all sequences to their leases: it writes no KV."""
    return not (await scrape(worker))["trtmesh_engine_live_sequences"]


@asynccontextmanager
async def killed(mesh: HandoffMesh, name: str) -> AsyncIterator[None]:
    """Kills a process; starts its successor after the block."""
    mesh.process(name).signal(signal.SIGKILL)
    yield
    await mesh.restart(name)


@asynccontextmanager
async def frozen(mesh: HandoffMesh, name: str) -> AsyncIterator[None]:
    """Stops a process for the block."""
    mesh.process(name).signal(signal.SIGSTOP)
    try:
        yield
    finally:
        mesh.process(name).signal(signal.SIGCONT)


@contextmanager
def cut(link: Link) -> Iterator[None]:
    """Aborts the connections of a link during the block."""
    link.cut()
    try:
        yield
    finally:
        link.mend()


@contextmanager
def silent(link: Link) -> Iterator[list[Lane]]:
    """Lets nothing through a link during the block; yields its lanes."""
    link.freeze()
    try:
        yield [link.to_target, link.from_target]
    finally:
        link.mend()


def name_of(held: Held, role: str) -> str:
    return {"sender": held.sender, "receiver": held.receiver, "router": ROUTERS[0]}[role]


def link_of(held: Held, ends: str) -> Link:
    """The link between two processes."""
    workers = held.mesh.workers
    match ends:
        case "router-sender":
            return workers[held.sender].router_link
        case "router-receiver":
            return workers[held.receiver].router_link
        case "receiver-sender":
            return workers[held.sender].fetch_link(held.receiver)
    raise AssertionError(ends)


async def _no_leases(mesh: HandoffMesh) -> None:
    """Waits until the leases of a frozen router have expired."""

    async def none_held() -> bool:
        return not await mesh.holds_leases()

    await eventually(none_held)
