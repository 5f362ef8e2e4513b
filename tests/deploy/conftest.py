"""The stack under test, once for all scenarios; they run one after another and leave it whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from deploy.stack import ComposeStack, compose_stack, why_not
from trtmesh.chassis.errors import Unavailable
from trtmesh.client import Client

READY_SECONDS = 180.0


@pytest.fixture(scope="session")
def stack() -> Iterator[ComposeStack]:
    if reason := why_not():
        pytest.skip(f"containers cannot run here: {reason}")
    with compose_stack() as stack:
        try:
            asyncio.run(_until_it_answers(stack))
        except TimeoutError:
            pytest.fail(f"the stack did not answer in time:\n{stack.logs()}")
        yield stack


async def _until_it_answers(stack: ComposeStack) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        try:
            async with Client(stack.address) as client:
                await client.complete(["x"], max_tokens=1)
        except Unavailable:
            await asyncio.sleep(0.5)
        else:
            return
    raise TimeoutError
