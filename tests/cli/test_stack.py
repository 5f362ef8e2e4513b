"""When a stack counts as started, and how often its processes restart."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.cli.child import Addresses, Child
from trtmesh.cli.mesh_settings import MeshSettings
from trtmesh.cli.plan import Plan, ProcessPlan
from trtmesh.cli.stack import (
    LONGEST_RESTART_SECONDS,
    RESTART_WINDOW_SECONDS,
    RestartBudget,
    Stack,
)
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1 import router_admin_pb2_grpc

MESSAGE_BYTES = 64 * 2**20
READY, CONNECTING = pb.WORKER_STATE_READY, pb.WORKER_STATE_CONNECTING


class SlowToMeet(router_admin_pb2_grpc.RouterAdminServiceServicer):
    """Knows the second worker only after a liveness check."""

    def __init__(self) -> None:
        self.asked_again = asyncio.Event()
        self.met_all = False

    async def WatchWorkers(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for second in (CONNECTING, READY):
            workers = [
                pb.Worker(address="a:1", state=READY),
                pb.Worker(address="b:1", state=second),
            ]
            tokenizers = [pb.TokenizerReplica(address="t:1", state=READY)]
            self.met_all = second == READY
            yield pb.WatchWorkersResponse(workers=workers, tokenizers=tokenizers)
            await self.asked_again.wait()

    async def GetPolicy(self, request: Any, context: Any) -> pb.GetPolicyResponse:
        self.asked_again.set()
        return pb.GetPolicyResponse()


async def test_start_waits_until_the_router_knows_every_worker() -> None:
    """Otherwise requests for the second worker's model would be refused after `ready`."""
    # Abstract for mypy: the other calls answer UNIMPLEMENTED.
    admin = SlowToMeet()  # type: ignore[abstract]
    server = GrpcServer(MESSAGE_BYTES)
    router_admin_pb2_grpc.add_RouterAdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    settings = MeshSettings(start_seconds=10)
    stack = Stack(settings, Plan(settings, None), lambda _name, _line: None)
    router = Child(ProcessPlan("router-0", "router", (), ports={}), lambda _name, _line: None)
    router.bound = Addresses(admin_address=f"127.0.0.1:{port}")
    try:
        async with asyncio.timeout(60):
            await stack._meet_peers(router)
    finally:
        await server.stop(grace=None)
    assert admin.met_all


def test_restart_delay_doubles_while_restarts_are_frequent() -> None:
    budget = RestartBudget(most_per_minute=100)
    assert [budget.take(now=100.0) for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_restart_delay_is_reset_by_a_minute_without_restarts() -> None:
    budget = RestartBudget(most_per_minute=100)
    first = budget.take(now=0.0)
    budget.take(now=1.0)
    assert budget.take(now=2 * RESTART_WINDOW_SECONDS) == first


def test_restarts_of_a_minute_are_limited() -> None:
    """The process ends at once each time."""
    budget = RestartBudget(most_per_minute=3)
    now, starts = 0.0, []
    for _ in range(20):
        now += budget.take(now)
        starts.append(now)
    windows = [
        [t for t in starts if begin <= t < begin + RESTART_WINDOW_SECONDS] for begin in starts
    ]
    assert max(map(len, windows)) == 3
    assert max(b - a for a, b in itertools.pairwise(starts)) > LONGEST_RESTART_SECONDS
