"""Many handoffs under random cancels and faults: equal tokens, no lease and no block left, nothing that grows.

`make chaos HANDOFFS=10000` makes more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import pytest
import pytest_asyncio
from chaos.handoff_cases import TRANSPORTS
from chaos.handoff_disturbances import Disturbances
from chaos.handoff_mesh import RECEIVERS, SENDER, HandoffMesh, flags_of, handoff_mesh
from chaos.handoff_progress import HANDOFFS, LEASES, HandoffProgress
from chaos.handoff_traffic import BUFFER_TOKENS, Traffic
from chaos.process_growth import Growth
from e2e.mesh import Mesh, running_mesh
from process_constants import constants
from trtmesh.v1 import router_admin_pb2 as admin_pb

STREAMED_SENDER = "streamed-sender"

ROLES = {SENDER: "prefill", STREAMED_SENDER: "prefill", **dict.fromkeys(RECEIVERS, "decode")}

MORTALS = (STREAMED_SENDER, RECEIVERS[1])

OTHER_TRANSPORT = "nixl" if "nixl" in TRANSPORTS else "shared_memory"

TRANSPORTS_OF = {
    SENDER: ",".join(TRANSPORTS),
    STREAMED_SENDER: "grpc",
    RECEIVERS[0]: "shared_memory,grpc",
    RECEIVERS[1]: f"{OTHER_TRANSPORT},grpc",
}
"""Every pair of workers has a transport, and every transport a pair."""

FAST = (
    *("--simulated-timing-step-ms", "8"),
    *("--simulated-timing-prefill-tokens-per-step", "64"),
    *("--simulated-timing-prefill-tokens-per-second", "40000"),
)

SMALL_POOL = ("--simulated-kv-cache-total-blocks", "256")
"""Full at times."""

ROUTER = (
    # Not even a busy machine is late with a renewal, so what expires was not released.
    *constants(lease_seconds=10),
    *constants(buffer_tokens=BUFFER_TOKENS, client_lease_seconds=2, max_parked=12),
    # Full before the first look at the memory.
    *constants(explained_decisions=64),
)

FREED_AT_ONCE = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
"""Settings of glibc with which freed memory goes back to the system, so that what remains is held."""

HANDOFFS_OF_THE_SUITE = 40
QUARTERS = 4
GAP = 10
"""Handoffs from one disturbance to the next."""

MOST_EXPIRED = 0.1
"""Share of leases: those of first halves whose client never returns."""


@pytest_asyncio.fixture
async def undisturbed() -> AsyncIterator[Mesh]:
    """One mixed worker."""
    flags = (*flags_of("undisturbed", "mixed", "grpc"), "--simulated-timing-step-ms", "0")
    async with running_mesh(engine_flags=flags) as mesh:
        yield mesh


@pytest_asyncio.fixture
async def mesh(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HandoffMesh]:
    for name, value in FREED_AT_ONCE.items():
        monkeypatch.setenv(name, value)
    flags = {
        name: (*flags_of(name, role, TRANSPORTS_OF[name]), *FAST, *SMALL_POOL)
        for name, role in ROLES.items()
    }
    async with handoff_mesh(flags, ROUTER) as mesh:
        yield mesh


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        asked: str = metafunc.config.getoption("--seeds", default=None) or "0"
        first, _, last = asked.partition("-")
        metafunc.parametrize("seed", range(int(first), int(last or first) + 1))


async def test_many_handoffs_leave_nothing(
    request: pytest.FixtureRequest, mesh: HandoffMesh, undisturbed: Mesh, seed: int
) -> None:
    asked = request.config.getoption("--handoffs", default=None)
    handoffs = int(asked or HANDOFFS_OF_THE_SUITE)
    traffic = Traffic(mesh, undisturbed.client, seed)
    progress, growth = HandoffProgress(mesh), Growth()
    disturbances = Disturbances(mesh, progress, ROLES, MORTALS, seed)
    # The first part warms up.
    for part in range(QUARTERS + 1):
        await disturb(traffic, progress, disturbances, (part + 1) * handoffs // (QUARTERS + 1))
        await mesh.settle()
        await progress.note()
        await growth.look(dict(mesh.processes()))
        print(f"{progress.handoffs} handoffs, {disturbances.counts.total()} disturbances")
    report(await leases(mesh), traffic, progress, disturbances, growth)
    check_outcomes(progress)


async def disturb(
    traffic: Traffic, progress: HandoffProgress, disturbances: Disturbances, handoffs: int
) -> None:
    """Sends requests under disturbances until there were so many handoffs."""
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        reaching = group.create_task(progress.reach(handoffs))
        group.create_task(traffic.run(over))
        group.create_task(disturbances.run(GAP))
        await reaching
        over.set()


def check_outcomes(progress: HandoffProgress) -> None:
    """Each transport moved KV, and few leases waited for their expiry."""
    ended = progress.counts(LEASES, "outcome")
    assert ended["expired",] < MOST_EXPIRED * ended.total()
    consumed = progress.counts(LEASES, "transport", "outcome")
    assert all(consumed[transport, "consumed"] for transport in TRANSPORTS)


async def leases(mesh: HandoffMesh) -> Mapping[str, admin_pb.Worker]:
    return {worker.worker: worker for worker in (await mesh.admin.list_workers()).workers}


def report(
    workers: Mapping[str, admin_pb.Worker],
    traffic: Traffic,
    progress: HandoffProgress,
    disturbances: Disturbances,
    growth: Growth,
) -> None:
    for title, counts in (
        ("requests", traffic.outcomes),
        ("handoffs", progress.counts(HANDOFFS, "cause", "result")),
        ("leases", progress.counts(LEASES, "side", "transport", "outcome")),
        ("disturbances", disturbances.counts),
    ):
        print(f"  {title} ({counts.total()}): {dict(sorted(counts.items()))}")
    for name, worker in workers.items():
        for side in (worker.load.sent_handoffs, worker.load.received_handoffs):
            sums = f"{side.consumed} + {side.released} + {side.expired} + {side.held}"
            print(f"  {name}: {side.granted} = {sums}, {side.bytes} bytes")
    for name, now in growth.looks[-1].items():
        print(f"  {name}: {growth.looks[0][name]}, now {now}")
    print(f"  worst stall {traffic.worst_stall_seconds:.2f} s")
