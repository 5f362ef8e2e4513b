"""An early end frees the engine's KV blocks and the router's handles."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from chaos.proxy import proxy_to
from e2e.mesh import SIMULATED, Mesh, StreamReader, eventually, running_mesh, scrape
from trtmesh.chassis.errors import DeadlineExceeded, Unavailable
from trtmesh.client import Client, FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROUNDS = 20
AT_ONCE = 10
BACKGROUND = 4
BACKGROUND_TOKENS = 20
MOST_TOKENS = 4000
"""Length of a request that ends early: without a stop, blocks would stay in use for this many steps."""
MOST_STEPS = MOST_TOKENS // 2
"""Bound on the steps from an early end to free blocks: far fewer than without a stop, and as many as a busy machine
needs, where the engine goes on while the others wait for a core. 24 were measured on a quiet one."""

# Any sequence here fits a block, so the blocks in use count live sequences.
ENGINE = (
    *(*SIMULATED, "--simulated-kv-cache-tokens-per-block", "4096"),
    *("--simulated-timing-step-ms", "16"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Mesh]:
    async with running_mesh(engine_flags=ENGINE) as mesh:
        yield mesh


Ending = Callable[[Mesh, int, random.Random], Awaitable[None]]


def open_some(mesh: Mesh, number: int, dice: random.Random, client: Client) -> StreamReader:
    """Opens a long request of one to three prompts with one or two sequences each."""
    prompts = [
        f"prompt {number} {index} " * dice.choice((1, 30)) for index in range(dice.randint(1, 3))
    ]
    return StreamReader(
        client,
        prompts,
        request_id=f"early-{number}",
        max_tokens=MOST_TOKENS,
        num_return_sequences=dice.randint(1, 2),
        text=dice.random() < 0.8,
        stream=dice.random() < 0.9,
    )


async def cancel(mesh: Mesh, number: int, dice: random.Random) -> None:
    reader = open_some(mesh, number, dice, mesh.client)
    if number % 2:
        await reader.until(lambda r: r.events)
    await asyncio.sleep(dice.uniform(0, 0.1))
    await reader.cancel()


async def disconnect(mesh: Mesh, number: int, dice: random.Random) -> None:
    async with proxy_to(mesh.router.address) as proxy, Client(proxy.address) as client:
        reader = open_some(mesh, number, dice, client)
        await proxy.connected.wait()
        if number % 2:
            await reader.until(lambda r: r.events)
        await asyncio.sleep(dice.uniform(0, 0.1))
        proxy.cut()
        with pytest.raises(Unavailable):
            await reader.result()


async def deadline(mesh: Mesh, number: int, dice: random.Random) -> None:
    prompts = [f"prompt {number}"] * dice.randint(1, 3)
    seconds = dice.uniform(0.001, 0.15)
    while True:
        reader = StreamReader(mesh.client, prompts, max_tokens=MOST_TOKENS, timeout_seconds=seconds)
        try:
            items = await reader.result()
        except DeadlineExceeded:
            pass
        else:
            # The engine knows the deadline too and may act first.
            assert {item.reason for item in items} == {FinishReason.CANCELLED}
        if number % 2 == 0 or reader.tokens():
            return
        # Every second request must reach the engine before its deadline, on any machine.
        seconds *= 2


async def stop(mesh: Mesh, number: int, dice: random.Random) -> None:
    reader = open_some(mesh, number, dice, mesh.client)
    await asyncio.sleep(dice.uniform(0, 0.1))
    # There is nothing to stop before the request arrives.
    await eventually(lambda: mesh.client.stop(f"early-{number}"))
    for item in await reader.result():
        assert item.reason is FinishReason.STOPPED


@asynccontextmanager
async def load(mesh: Mesh) -> AsyncIterator[None]:
    """Runs undisturbed streams in several lanes and checks their output."""
    over = asyncio.Event()
    prompts = [f"background {lane}" for lane in range(BACKGROUND)]
    alone = await mesh.client.complete(prompts, max_tokens=BACKGROUND_TOKENS)

    async def lane(index: int) -> int:
        rounds = 0
        while not over.is_set():
            (item,) = await mesh.client.complete([prompts[index]], max_tokens=BACKGROUND_TOKENS)
            assert item.error is None
            assert (item.token_ids, item.text) == (alone[index].token_ids, alone[index].text)
            assert len(item.token_ids) == BACKGROUND_TOKENS
            rounds += 1
        return rounds

    lanes = [asyncio.create_task(lane(index)) for index in range(BACKGROUND)]
    try:
        yield
        over.set()
        assert min(await asyncio.gather(*lanes)) > 0
    finally:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)


async def ended_early(mesh: Mesh) -> float:
    """The number of cancelled sequences on the engine."""
    engine = await scrape(mesh.engines[0], reason="cancelled")
    return engine.get("trtmesh_engine_sequences_finished_total", 0.0)


@pytest.mark.parametrize("ending", [cancel, disconnect, deadline, stop])
async def test_early_end_frees_kv_blocks_and_handles(mesh: Mesh, ending: Ending) -> None:
    dice = random.Random(ending.__name__)
    worst_seconds, worst_steps = 0.0, 0.0

    async def only_the_background_is_left() -> bool:
        engine = await scrape(mesh.engines[0])
        return engine["trtmesh_engine_used_blocks"] <= BACKGROUND

    before = (await scrape(mesh.router)).get("trtmesh_router_requests_total", 0.0)
    ended_before = await ended_early(mesh)
    async with load(mesh):
        for number in range(0, ROUNDS, AT_ONCE):
            await asyncio.gather(
                *(ending(mesh, each, dice) for each in range(number, number + AT_ONCE))
            )
            ended_at = time.monotonic()
            steps = (await scrape(mesh.engines[0]))["trtmesh_engine_steps_total"]
            await eventually(only_the_background_is_left)
            worst_seconds = max(worst_seconds, time.monotonic() - ended_at)
            after = (await scrape(mesh.engines[0]))["trtmesh_engine_steps_total"]
            worst_steps = max(worst_steps, after - steps)
    await mesh.idle()
    assert worst_steps <= MOST_STEPS
    # Every second request had tokens; the others may never have left their client.
    arrived = (await scrape(mesh.router))["trtmesh_router_requests_total"] - before
    assert arrived >= ROUNDS / 2
    if ending is deadline:
        assert await ended_early(mesh) - ended_before >= ROUNDS / 2
    print(
        f"{ending.__name__}: blocks of {AT_ONCE} requests free after at most {worst_seconds * 1000:.0f} ms and"
        f" {worst_steps:.0f} steps, a report every 50 ms included"
    )
