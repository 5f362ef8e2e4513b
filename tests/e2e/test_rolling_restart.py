"""A rolling restart of all engines, beside one that was started first: every stream moves once, and none notices."""

from __future__ import annotations

import asyncio

from e2e.mesh import ENDLESS, LASTING, PATIENT, Mesh, check_beginning, running_mesh, scrape

PROMPTS = [f"item {number}" for number in range(8)]
TOKENS = 50
NAMES = ("one", "two")
LEAD_SECONDS = 1.5
"""Engines that join together are equally old."""


async def start(mesh: Mesh) -> None:
    await mesh.start_tokenizer()
    for name in NAMES:
        await mesh.start_engine(*LASTING, "--worker", name)
    await mesh.start_router(*PATIENT, "--placement-policy", "round_robin")
    await mesh.ready(workers=2, tokenizers=1)


async def test_every_stream_moves_once() -> None:
    async with running_mesh(start=start) as mesh:
        expected = await mesh.client.complete(PROMPTS, max_tokens=TOKENS, ignore_end_id=True)
        reader = mesh.open(PROMPTS, max_tokens=ENDLESS, ignore_end_id=True)
        await reader.until(lambda r: all(r.tokens(index) > 5 for index in range(len(PROMPTS))))
        await asyncio.sleep(LEAD_SECONDS)
        spare = await mesh.start_engine(*LASTING, "--worker", "spare")
        await mesh.admin.add_worker(spare.address)
        for number, name in enumerate(NAMES):
            await mesh.ready(workers=3)
            drained = await mesh.admin.drain_worker(name, finish_seconds=0)
            assert (drained.moved_sequences, drained.left_sequences) == (4, 0)
            old = mesh.engines[number]
            assert await old.stop() == 0
            port = int(old.address.rpartition(":")[2])
            await mesh.start_engine(*LASTING, "--worker", name, port=port)
            await mesh.admin.resume_worker(name)
        samples = await scrape(mesh.router)
        assert samples["trtmesh_router_moved_sequences_total"] == len(PROMPTS)
        check_beginning(await reader.stopped_at(TOKENS), expected)
        await mesh.ready(workers=3)
        await mesh.idle()
