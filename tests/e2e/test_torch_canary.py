"""The canary over a real model: a flipped bit of the weights, of an adapter or of KV that is reused is found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from chaos.tiny_adapters import OF_SMALL, tiny_adapter
from e2e.corruption import TORCH_FAULT, corrupted
from e2e.mesh import PATIENT, SMALL, Mesh, eventually, running_mesh, scrape
from e2e.test_canary import NAMES, alerts, examined, outcomes, state_of
from trtmesh.v1 import router_admin_pb2 as admin_pb

TORCH = (
    *(*SMALL, "--torch-threads", "1", "--torch-kv-cache-tokens", "4096"),
    *("--torch-batch-invariant", "true", "--load-interval-seconds", "0.05"),
    *("--torch-adapters-host-bytes", str(2**26), "--torch-adapters-max-batch-adapters", "1"),
)
ADAPTER = "small"
FAULTS = ("weights", "adapter", "kv")
LAST_TOKEN = 379
MOST_ITEMS = 12
"""Each is compared, and every third is the bad worker's."""


def prompt_of(fault: str) -> list[int]:
    """KV of former faults is not reused."""
    return [300 + FAULTS.index(fault), *range(300, LAST_TOKEN + 1)]


@pytest.mark.timeout(900)
async def test_flipped_bit_is_found(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    flag.touch()

    async def start(mesh: Mesh) -> None:
        code = TORCH_FAULT.format(flag=str(flag), token=LAST_TOKEN)
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
        adapter = tiny_adapter(1, 8, of=OF_SMALL).content
        await mesh.admin.upload_adapter(admin_pb.AddAdapterRequest(name=ADAPTER), adapter)

        async def ask(fault: str, items: int) -> bool:
            """Whether an alert came within so many items."""
            told = await alerts(mesh)
            options: dict[str, Any] = {"max_tokens": 6, "ignore_end_id": True}
            if fault == "adapter":
                options["adapter"] = ADAPTER
            for _ in range(items):
                await mesh.client.complete([prompt_of(fault)], **options)
                await eventually(lambda: examined(mesh))
                if await alerts(mesh) != told:
                    return True
            return False

        for number, fault in enumerate(FAULTS):
            # Workers have the prompt's KV from here on.
            assert not await ask(fault, len(NAMES))
            flag.write_text(fault)
            assert await ask(fault, MOST_ITEMS), fault
            assert await alerts(mesh) == {"bad": number + 1}
            assert (await state_of(mesh, "bad")).state == admin_pb.WORKER_STATE_DRAINING
            flag.write_text("")
            await mesh.admin.resume_worker("bad")
        found = await outcomes(mesh)
        assert found["identical"] >= len(FAULTS) * len(NAMES)
        assert found["failed"] == found["dropped"] == 0
        samples = await scrape(mesh.router)
        assert samples["trtmesh_router_worker_leases"] == 0
