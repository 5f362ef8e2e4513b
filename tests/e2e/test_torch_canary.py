"""The canary over a real model: spoilt KV that is reused shows in the tokens."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from e2e.corruption import TORCH_FAULT, corrupted
from e2e.mesh import DEMO, PATIENT, Mesh, eventually, running_mesh, scrape
from e2e.test_canary import NAMES, alerts, examined, outcomes, state_of
from trtmesh.v1 import router_admin_pb2 as admin_pb

TORCH = (
    *("--model-dir", str(DEMO), "--torch-threads", "1", "--torch-kv-cache-tokens", "4096"),
    *("--torch-batch-invariant", "true", "--load-interval-seconds", "0.05"),
)
PROMPT = list(range(300, 380))
MOST_ITEMS = 12
"""Each is compared, and every third is the bad worker's."""


async def test_spoilt_kv_is_found(tmp_path: Path) -> None:
    flag = tmp_path / "flag"

    async def start(mesh: Mesh) -> None:
        code = TORCH_FAULT.format(flag=str(flag))
        starts = [mesh.start_tokenizer()]
        for name in NAMES:
            env = corrupted(tmp_path / "fault", code) if name == "bad" else None
            starts.append(mesh.start_engine(*TORCH, "--worker", name, env=env))
        await asyncio.gather(*starts)
        await mesh.start_router(
            *PATIENT, "--canary-share", "1", "--placement-policy", "round_robin"
        )
        await mesh.ready(len(NAMES), 1)

    async with running_mesh(start=start) as mesh:
        options: dict[str, Any] = {"max_tokens": 16, "ignore_end_id": True, "log_probs": True}

        async def ask(items: int) -> None:
            for _ in range(items):
                await mesh.client.complete([PROMPT], **options)
                await eventually(lambda: examined(mesh))
                if await alerts(mesh):
                    return

        await ask(len(NAMES))
        assert not await alerts(mesh)
        assert (await outcomes(mesh))["identical"] == len(NAMES)
        flag.touch()
        await ask(MOST_ITEMS)
        assert await alerts(mesh) == {"bad": 1}
        assert (await state_of(mesh, "bad")).state == admin_pb.WORKER_STATE_DRAINING
        samples = await scrape(mesh.router)
        assert samples["trtmesh_router_worker_leases"] == 0
