"""The path of devices other than the CPU, computed on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine.torch.harness import configure, running
from oracle import tiny_models
from trtmesh.engine.backends.torch import loading
from trtmesh.engine.backends.torch.accelerator import Accelerator

CONFIGS = [
    configure(max_tokens=12, ignore_end_id=True),
    configure(max_tokens=12, ignore_end_id=True, temperature=1.0, seed=3, top_k=20, log_probs=True),
    configure(max_tokens=12, ignore_end_id=True, temperature=0.8, seed=3, top_p=0.9999),
    configure(max_tokens=12, ignore_end_id=True, beam_width=3),
]


class OnCpu(Accelerator):
    """The accelerator without the calls of CUDA."""

    pins_memory = False

    def allocated_bytes(self) -> int:
        return 0


async def test_accelerator_gives_the_tokens_of_the_cpu(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tiny_models.prompts(4)
    async with running(llama, kv_cache_tokens=1024) as engine:
        expected = [await engine.run(prompts, config) for config in CONFIGS]
    monkeypatch.setattr(loading, "_device", lambda _: OnCpu(torch.device("cpu")))
    async with running(llama, kv_cache_tokens=1024, dtype="float32") as engine:
        assert [await engine.run(prompts, config) for config in CONFIGS] == expected
