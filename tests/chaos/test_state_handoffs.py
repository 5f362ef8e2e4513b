"""Handoffs by state under faults at every stage: no token is lost or repeated, and no lease or block is left."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from chaos.fragile import contents
from chaos.handoff_cases import LONG, check_beginning, longest
from chaos.handoff_mesh import ROUTERS, SENDER, HandoffMesh
from chaos.proxy import Proxy, proxy_to
from chaos.state_mesh import CONTINUED, STAGES, state_mesh
from e2e.mesh import StreamReader, eventually
from trtmesh.chassis.errors import Unavailable
from trtmesh.client import Client, FinishReason
from trtmesh.v1 import router_admin_pb2 as admin_pb

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS: dict[str, Any] = {
    "ignore_end_id": True,
    "temperature": 0.9,
    "seed": 5,
}
TOKENS = 30
ATTEMPTS = 20
"""A slow moment of the machine may let a request pass a stage unseen."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[HandoffMesh]:
    async with state_mesh() as mesh:
        yield mesh


@dataclass(frozen=True)
class Held:
    """A request at a stage of its handoff."""

    reader: StreamReader
    proxy: Proxy
    """Between the client and the first router."""
    prompts: Sequence[list[int]]
    placement: admin_pb.Placement


@asynccontextmanager
async def held_at(
    mesh: HandoffMesh, stage: str, *, resumes: bool = True, tokens: int = TOKENS
) -> AsyncIterator[Held]:
    """A request at a stage, of a client of the first router, and of the other as its second choice if it `resumes`."""
    first, other = (mesh.routers[name].address for name in ROUTERS)
    for _ in range(ATTEMPTS):
        prompts = mesh.fresh_prompts(1)
        async with proxy_to(first) as proxy:
            addresses = [proxy.address, other] if resumes else [proxy.address]
            async with Client(addresses, resume_seconds=60 if resumes else 0) as client:
                reader = StreamReader(client, prompts, **OPTIONS, max_tokens=tokens)
                try:
                    if await _reaches(mesh, reader, stage):
                        explained = await mesh.admin.explain(reader.request_id)
                        yield Held(reader, proxy, prompts, explained.placements[0])
                        return
                finally:
                    await reader.cancel()
        await mesh.settle()
    raise AssertionError(f"no request was {stage} in {ATTEMPTS} attempts")


async def _reaches(mesh: HandoffMesh, reader: StreamReader, stage: str) -> bool:
    """Waits for a stage; False if the request passed it unseen."""
    if stage == CONTINUED:
        await reader.until(lambda reader: reader.tokens() > 5)
        return not reader.is_over
    seen: list[str] = []

    async def there_or_past() -> bool:
        seen[:] = [each.stage for each in await mesh.handoffs()]
        # The first event names the request, and comes a little after the request has reached its first stage.
        is_there = stage in seen and bool(reader.events)
        return is_there or reader.tokens() > 1 or reader.is_over

    await eventually(there_or_past)
    return stage in seen and bool(reader.events)


async def complete(mesh: HandoffMesh, held: Held) -> None:
    """Waits for the end of a request, and checks its tokens, and that nothing is left."""
    items = await held.reader.result()
    await mesh.settle()
    whole = await mesh.client.complete(held.prompts, **OPTIONS, max_tokens=TOKENS)
    assert contents(items) == contents(whole)
    await mesh.settle()


@pytest.mark.parametrize("victim", ["sender", "receiver"])
@pytest.mark.parametrize("stage", STAGES)
async def test_killed_worker_costs_no_token(mesh: HandoffMesh, stage: str, victim: str) -> None:
    async with held_at(mesh, stage) as held:
        placement = held.placement
        assert (placement.prefill_worker, placement.handoff_kind) == (SENDER, "simulated")
        await kill(mesh, placement.prefill_worker if victim == "sender" else placement.worker)
        await complete(mesh, held)


async def kill(mesh: HandoffMesh, name: str) -> None:
    mesh.process(name).signal(signal.SIGKILL)
    await mesh.restart(name)


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        pytest.param(stage, how, marks=[] if place == other else pytest.mark.soak)
        for place, stage in enumerate(STAGES)
        for other, how in enumerate(["stop", "cancel", "disconnect"])
    ],
)
async def test_client_ends_both_halves(mesh: HandoffMesh, stage: str, how: str) -> None:
    async with held_at(mesh, stage, resumes=how != "disconnect", tokens=LONG) as held:
        reader = held.reader
        if how == "stop":
            assert await mesh.client.stop(reader.request_id) == 1
            assert [item.reason for item in await reader.result()] == [FinishReason.STOPPED]
        elif how == "cancel":
            await reader.cancel()
        else:
            held.proxy.cut()
            with pytest.raises(Unavailable):
                await reader.result()
        await mesh.settle()
        tokens = longest(reader.items)
        whole = await mesh.client.complete(held.prompts, **OPTIONS, max_tokens=tokens)
        check_beginning(reader.items, whole)
        await mesh.settle()


@pytest.mark.parametrize("stage", STAGES)
async def test_killed_router_costs_no_token(mesh: HandoffMesh, stage: str) -> None:
    """Its workers release both halves, and the client resumes at the other router."""
    async with held_at(mesh, stage) as held:
        await kill(mesh, ROUTERS[0])
        await complete(mesh, held)


async def test_state_of_a_frozen_router_expires(mesh: HandoffMesh) -> None:
    before = await mesh.ended(SENDER, "sent", "expired")
    async with held_at(mesh, "prefilling") as held:
        router = mesh.process(ROUTERS[0])
        router.signal(signal.SIGSTOP)
        try:

            async def expired() -> bool:
                return await mesh.ended(SENDER, "sent", "expired") > before

            await eventually(expired)
        finally:
            router.signal(signal.SIGCONT)
        await complete(mesh, held)
