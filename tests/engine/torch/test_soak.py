"""The soak of `make bench B=soak`, short."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from engine.torch.conftest import Device

SOAK = Path(__file__).parents[3] / "bench" / "soak.py"
REQUESTS, SECONDS = 300, 90.0
GPU_REQUESTS, GPU_MINUTES = 10_000, 5.0


@pytest.mark.soak
async def test_soak_leaves_no_blocks_and_no_memory(
    device: Device, pytestconfig: pytest.Config
) -> None:
    requests, seconds = REQUESTS, SECONDS
    if device:
        requests = pytestconfig.getoption("--soak-requests", default=None) or GPU_REQUESTS
        minutes = pytestconfig.getoption("--soak-minutes", default=None) or GPU_MINUTES
        seconds = 60 * minutes
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SOAK), "--requests", str(requests), "--seconds", str(seconds),
        "--device", device.get("device", "cpu"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert output, errors.decode()
    figures = json.loads(output.splitlines()[-1])
    assert figures["wrong"] == []
    assert process.returncode == 0
    # The run covered all its scenarios.
    assert figures["stopped"] > 50
    assert figures["refused"] > 0
    assert figures["preemptions"] > 0
    assert figures["used_host_blocks"] > 0
    given = {"prompt_log_probs", "context_logits", "generation_logits", "bad_table", "adapted"}
    assert given <= {name for name, count in figures["given"].items() if count > 5}
