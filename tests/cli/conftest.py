from __future__ import annotations

import time
from collections.abc import Iterator

import grpc
import pytest
from cli.commands import Stack, running_stack
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1 import router_admin_pb2_grpc


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two routers and two simulated engines, shared by read-only tests. In a session they would idle for long."""
    with running_stack("--engines", "2", "--routers", "2", "--port", "0") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def idle_stack(stack: Stack) -> Stack:
    """The stack without live requests: a router may notice the end of a client after the test."""
    with grpc.insecure_channel(stack.admin) as channel:
        ask = router_admin_pb2_grpc.RouterAdminServiceStub(channel).ListRequests
        while ask(pb.ListRequestsRequest(limit=1), wait_for_ready=True).live_requests:
            time.sleep(0.01)
    return stack


@pytest.fixture
def router(idle_stack: Stack) -> str:
    """Address of the stack's router."""
    return idle_stack.wait_ready()


@pytest.fixture
def admin(idle_stack: Stack) -> str:
    """Admin address of the stack's router."""
    return idle_stack.admin
