from __future__ import annotations

from collections.abc import Iterator

import pytest
from cli.commands import Stack, running_stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """Two simulated engines behind a tokenizer and a router, for tests that only talk to them."""
    with running_stack("--engines", "2", "--port", "0") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def router(stack: Stack) -> str:
    """Address of the stack's router."""
    return stack.wait_ready()


@pytest.fixture
def admin(stack: Stack) -> str:
    """Address of the stack's router for admins."""
    return stack.admin
