from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli.commands import Stack, running_stack, until_idle


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Two routers and two simulated engines, shared by read-only tests. In a session they would idle for long."""
    with running_stack("--engines", "2", "--routers", "2", "--port", "0") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def idle_stack(stack: Stack) -> Stack:
    """The stack without live requests of earlier tests."""
    until_idle(stack.admin)
    return stack


@pytest.fixture
def router(idle_stack: Stack) -> str:
    """Address of the stack's router."""
    return idle_stack.wait_ready()


@pytest.fixture
def admin(idle_stack: Stack) -> str:
    """Admin address of the stack's router."""
    return idle_stack.admin
