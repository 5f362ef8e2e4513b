"""A broken backend moves its items; an item with a broken input fails alone."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from e2e.mesh import PATIENT, SMALL, Mesh, eventually, running_mesh, scrape
from trtmesh.chassis.errors import BackendFailed

PROMPTS = [[300 + number, 40, 50, 60] for number in range(6)]
POISON = 77
STEPS_TO_BREAK = 20
"""Enough for every item to have tokens, far fewer than a request takes."""
TORCH = (*SMALL, "--torch-threads", "1", "--torch-kv-cache-tokens", "8192")

FAULTS = """
import os
import time
import torch

steps = 0

def hook(module, positional):
    global steps
    if isinstance(module, torch.nn.Embedding):
        # No stream ends before a test breaks it.
        time.sleep(0.01)
        steps += os.path.exists({flag!r})
        if bool((positional[0] == {poison}).any()):
            raise RuntimeError("this input is too much")
    if steps > {most_steps}:
        raise RuntimeError("the device is gone")

torch.nn.modules.module.register_module_forward_pre_hook(hook)
"""
"""Injected into real processes as sitecustomize.py, which Python runs at start."""


async def test_broken_backend_moves_its_items(tmp_path: Path) -> None:
    flags = [tmp_path / name for name in ("one", "two")]

    async def start(mesh: Mesh) -> None:
        await asyncio.gather(
            mesh.start_tokenizer(),
            *(mesh.start_engine(*TORCH, "--worker", each.name, env=faulty(each)) for each in flags),
        )
        await mesh.start_router(*PATIENT, "--placement-policy", "round_robin")
        await mesh.ready(workers=2, tokenizers=1)

    async with running_mesh(start=start) as mesh:
        options: dict[str, Any] = {"max_tokens": 32, "ignore_end_id": True}
        expected = await mesh.client.complete(PROMPTS, **options)
        await check_poison_stays(mesh)
        flags[0].with_suffix(".broken").touch()
        reader = mesh.open(PROMPTS, **options)
        for item, whole in zip(await reader.result(), expected, strict=True):
            assert item.error is None
            assert (item.token_ids, item.text) == (whole.token_ids, whole.text)
        assert {item.started.worker for item in reader.items if item.started} == {"one", "two"}
        assert await mesh.engines[0].wait() == 1
        assert "cannot compute a single token" in mesh.engines[0].stderr
        assert await moved(mesh) > 0
        await mesh.idle()


async def check_poison_stays(mesh: Mesh) -> None:
    """Checks an item with a broken input: fails without migrating; the rest of the batch continues."""
    poison, mate = await mesh.client.complete([[POISON, 5], PROMPTS[0]], max_tokens=20)
    assert isinstance(poison.error, BackendFailed)
    assert "this input is too much" in poison.error.message
    assert mate.error is None
    assert await moved(mesh) == 0
    await eventually(lambda: is_well(mesh))


async def is_well(mesh: Mesh) -> bool:
    return not any((await mesh.gauges()).values())


async def moved(mesh: Mesh) -> float:
    return (await scrape(mesh.router)).get("trtmesh_router_moved_sequences_total", 0.0)


def faulty(flag: Path) -> dict[str, str]:
    """Environment of a process that fails on POISON, and for good a few steps after the file `flag`.broken appears."""
    flag.mkdir()
    broken = str(flag.with_suffix(".broken"))
    code = FAULTS.format(flag=broken, poison=POISON, most_steps=STEPS_TO_BREAK)
    (flag / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(flag), os.environ.get("PYTHONPATH", "")])}
