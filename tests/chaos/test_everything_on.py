"""Kills, freezes and drains while streams are hedged, moved, compared and receipted: every stream is as undisturbed.
Then a worker's bits flip: it rests, and streams are as undisturbed again.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos.fragile import contents
from chaos.steady_streams import steady_streams
from e2e.corruption import SIMULATED_FAULT, corrupted
from e2e.mesh import SIMULATED, Mesh, eventually, lasting, running_mesh, scrape
from process_constants import constants
from router.adapters.contents_of import content
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.v1 import router_admin_pb2 as admin_pb

NAMES = ("one", "two", "three", "four")
ENGINE = (
    *SIMULATED,
    *("--simulated-kv-cache-total-blocks", "150", "--simulated-kv-cache-tokens-per-block", "16"),
    *("--simulated-adapters-slots", "4", "--simulated-timing-step-ms-per-sequence", "1"),
    # Few tokens take longer than it takes to strike, on a busy machine too.
    *("--simulated-timing-step-ms", "60"),
)
ROUTER = (
    *("--canary-share", "1", "--defragment", "true"),
    # On a busy machine prompts seem expensive, and copies are many.
    *("--hedge-share", "0.5"),
    *("--retries-worker-wait-seconds", "60", *constants(max_lost_workers=100, lease_seconds=1)),
)
PROMPT = list(range(300, 460))
TOKENS = 30
FREEZE_SECONDS = 1.0
BAD = NAMES[-1]
MOST_ITEMS = 24
"""Until the bad worker took one, or repeated one."""

ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": TOKENS},
    "sampled": {"max_tokens": TOKENS, "temperature": 0.9, "seed": 3},
    "several": {"max_tokens": 15, "temperature": 0.8, "seed": 5, "num_return_sequences": 3},
    "adapter": {"max_tokens": TOKENS, "adapter": "tiny"},
    "stops": {"max_tokens": TOKENS, "stop_texts": ["ee", "tt"], "min_tokens": 8},
}


async def start(folder: Path, mesh: Mesh) -> None:
    flipped = f"__import__('os').path.exists({str(folder / 'flipped')!r})"
    fault = corrupted(folder / "fault", SIMULATED_FAULT.format(condition=flipped))
    starts = [
        mesh.start_engine(*ENGINE, "--worker", name, env=fault if name == BAD else None)
        for name in NAMES
    ]
    await asyncio.gather(mesh.start_tokenizer(), *starts)
    await mesh.start_router(*ROUTER, "--receipts-file", str(folder / "receipts.jsonl"))
    await mesh.ready(len(NAMES), 1)


@pytest.mark.parametrize("struck", [2, pytest.param(3, marks=pytest.mark.soak)])
async def test_streams_are_identical_and_nothing_is_left(tmp_path: Path, struck: int) -> None:
    async with running_mesh(start=partial(start, tmp_path)) as mesh:
        adapter = admin_pb.AddAdapterRequest(name="tiny")
        await mesh.admin.upload_adapter(adapter, content(b"tiny"))
        prompts: list[str | list[int]] = [PROMPT, "another begins"]
        expected = {
            name: contents(await mesh.client.complete(prompts, **options))
            for name, options in ASKED.items()
        }

        async def ask(name: str) -> None:
            items = await mesh.client.complete(prompts, **ASKED[name])
            assert contents(items) == expected[name]

        async with steady_streams([partial(ask, name) for name in ASKED]):
            for number in range(struck):
                await suffer(mesh, number)
            await mesh.counted("moved_sequences", 1)
            # A copy is in time for many freezes, not for each.
            while not await some_won(mesh):
                await frozen(mesh, await busy(mesh))
        await lasting(lambda: compared(mesh))
        samples = await scrape(mesh.router)
        assert not samples.get("trtmesh_router_canary_alerts_total")
        identical = await scrape(mesh.router, outcome="identical")
        assert identical["trtmesh_router_canary_items_total"] > 0
        for outcome in ("different", "failed", "inexact"):
            found = await scrape(mesh.router, outcome=outcome)
            assert not found.get("trtmesh_router_canary_items_total")
        (tmp_path / "flipped").touch()
        for _ in range(MOST_ITEMS):
            await mesh.client.complete(prompts, **ASKED["greedy"])
            await lasting(lambda: compared(mesh))
            if await resting(mesh):
                break
        assert await resting(mesh) == {BAD}
        for name in ASKED:
            await ask(name)
        await mesh.idle()
        await eventually(lambda: no_lease_is_left(mesh))


async def suffer(mesh: Mesh, number: int) -> None:
    """Strikes workers with streams while these move: freezes or drains one, then kills one and starts another in its
    place."""
    moving = asyncio.create_task(rebalanced(mesh))
    name = await busy(mesh)
    if number % 2:
        await frozen(mesh, name)
    else:
        await mesh.admin.drain_worker(name, by_seconds=1)
        await mesh.admin.resume_worker(name)
    await moving
    moving = asyncio.create_task(rebalanced(mesh))
    name = await busy(mesh)
    engine = mesh.engines[NAMES.index(name)]
    engine.signal(signal.SIGKILL)
    await engine.wait()
    await moving
    port = int(engine.address.rpartition(":")[2])
    await mesh.start_engine(*ENGINE, "--worker", name, port=port)
    mesh.engines[NAMES.index(name)] = mesh.engines.pop()
    await mesh.ready(len(NAMES))


async def frozen(mesh: Mesh, name: str) -> None:
    engine = mesh.engines[NAMES.index(name)]
    engine.signal(signal.SIGSTOP)
    await asyncio.sleep(FREEZE_SECONDS)
    engine.signal(signal.SIGCONT)


async def busy(mesh: Mesh) -> str:
    """A worker with streams; not the bad one, which lives on."""
    found: list[str] = []

    async def one_is() -> bool:
        workers = (await mesh.status()).workers
        found[:] = [each.worker for each in workers if each.items and each.worker != BAD]
        return bool(found)

    await eventually(one_is)
    return found[0]


async def some_won(mesh: Mesh) -> bool:
    won = await scrape(mesh.router, outcome="won")
    return won.get("trtmesh_router_hedges_total", 0.0) > 0


async def rebalanced(mesh: Mesh) -> None:
    for _ in range(3):
        with suppress(TrtmeshError):
            await mesh.admin.rebalance_workers()
        await asyncio.sleep(FREEZE_SECONDS / 4)


async def resting(mesh: Mesh) -> set[str]:
    """The workers that the canary found at fault."""
    workers = (await mesh.status()).workers
    return {each.worker for each in workers if "contradict" in each.problem}


async def compared(mesh: Mesh) -> bool:
    samples = await scrape(mesh.router)
    busy = ("canary_waiting", "worker_sequences", "live_items")
    return not any(samples[f"trtmesh_router_{name}"] for name in busy)


async def no_lease_is_left(mesh: Mesh) -> bool:
    held = [(await scrape(engine))["trtmesh_engine_held_leases"] for engine in mesh.engines]
    return not any(held) and not (await scrape(mesh.router))["trtmesh_router_worker_leases"]
