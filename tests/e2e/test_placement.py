"""Placement over real engines with caches of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from e2e.mesh import PATIENT, SIMULATED, Mesh, eventually, running_mesh, scrape
from processes import ServiceProcess
from trtmesh.client import Client, GenerateItem, ItemResult, Prompt, TokenIds
from trtmesh.client.options import build_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK = 32
"""Tokens of a block of the simulated backend."""
FLAGS = (*PATIENT, "--placement-policy", "prefix_aware")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    """Three engines and a router."""
    async with running_mesh(
        tokenizers=0, engines=3, engine_flags=SIMULATED, router_flags=FLAGS
    ) as mesh:
        yield mesh


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(mesh: Mesh) -> ServiceProcess:
    """A second router over the same engines."""
    engines = ",".join(engine.address for engine in mesh.engines)
    return await mesh.start("router", "--port", "0", "--engines", engines, *FLAGS)


def prompt(prefix: int, tail: int, blocks: int = 4) -> list[int]:
    """Token ids of a shared prefix and a tail."""
    return [100 + prefix] * (BLOCK * blocks) + [2000 + tail] * 8


async def place(client: Client, ids: list[int]) -> ItemResult:
    (item,) = await client.complete([ids], max_tokens=2, text=False)
    assert item.error is None
    return item


def worker_of(item: ItemResult) -> str:
    assert item.started
    return item.started.worker


async def test_equal_prefixes_meet_on_the_worker_that_holds_them(mesh: Mesh) -> None:
    # For so few unknown prefixes, prefix_aware need not use every worker.
    await mesh.admin.set_policy("round_robin")
    homes = [worker_of(await place(mesh.client, prompt(p, 0))) for p in range(6)]
    assert len(set(homes)) == 3
    await mesh.admin.set_policy("prefix_aware")
    for tail in range(1, 4):
        items = await asyncio.gather(*(place(mesh.client, prompt(p, tail)) for p in range(6)))
        assert [worker_of(item) for item in items] == homes
        assert all(item.usage.cached_prompt_tokens == 4 * BLOCK for item in items)
    await mesh.idle()


async def test_two_routers_of_the_same_workers_agree(mesh: Mesh, other: ServiceProcess) -> None:
    index = "trtmesh_router_kv_index_blocks"
    before = (await scrape(mesh.router))[index]
    homes = [worker_of(await place(mesh.client, prompt(p, 0))) for p in range(10, 16)]

    async def agree() -> bool:
        known = (await scrape(mesh.router))[index]
        return known >= before + 6 * 4 and known == (await scrape(other))[index]

    await eventually(agree)
    async with Client(other.address) as client:
        items = [await place(client, prompt(p, 1)) for p in range(10, 16)]
    assert [worker_of(item) for item in items] == homes
    assert all(item.usage.cached_prompt_tokens == 4 * BLOCK for item in items)


async def test_salt_separates_equal_prompts(mesh: Mesh) -> None:
    ids = prompt(20, 0)
    await mesh.client.complete([ids], max_tokens=2, text=False, request_id="plain")
    config = build_config(None, {"max_tokens": 2, "text": False})
    config.kv_cache.salt = "mine"
    salted = GenerateItem(prompt=Prompt(token_ids=TokenIds(ids=ids)), config=config)
    await mesh.client.complete([salted], request_id="salted")
    told = await mesh.admin.explain("salted")
    assert not any(c.cached_tokens for c in told.placements[0].candidates)
    await mesh.client.complete([ids], max_tokens=2, text=False, request_id="again")
    told = await mesh.admin.explain("again")
    assert max(c.cached_tokens for c in told.placements[0].candidates) == 4 * BLOCK


async def test_policy_changes_while_the_router_runs(mesh: Mesh) -> None:
    await place(mesh.client, prompt(30, 0))
    assert len({worker_of(await place(mesh.client, prompt(30, t))) for t in range(1, 7)}) == 1
    answer = await mesh.admin.set_policy("round_robin")
    assert answer.previous == "prefix_aware"
    try:
        turns = [worker_of(await place(mesh.client, prompt(30, t))) for t in range(7, 13)]
        assert {turns.count(worker) for worker in turns} == {2}
    finally:
        await mesh.admin.set_policy("prefix_aware")


async def test_siblings_compute_their_common_prefix_once(mesh: Mesh) -> None:
    ids = [prompt(40, tail) for tail in range(6)]
    items = await mesh.client.complete(ids, max_tokens=2, text=False)
    assert len({worker_of(item) for item in items}) == 1
    reused = [item.usage.cached_prompt_tokens for item in items]
    assert sorted(reused) == [0] + [4 * BLOCK] * 5
    await mesh.idle()
