"""Threads of a CPU operation: the setting, else OMP_NUM_THREADS, else one per physical core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from e2e.mesh import DEMO
from engine.short_names import by_short_names
from trtmesh.chassis.cores import physical_cores
from trtmesh.engine.backends.torch.cpu.device import top
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.settings import TorchSettings

PRINTS_THREADS = """
import torch
from trtmesh.engine.backends.torch.cpu.device import take_threads
for setting in (0, 2):
    take_threads(setting)
    print(torch.get_num_threads())
"""


@pytest.mark.parametrize(("variable", "default"), [("1", 1), (None, physical_cores())])
def test_threads_follow_setting_variable_and_cores(variable: str | None, default: int) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    if variable is not None:
        environment["OMP_NUM_THREADS"] = variable
    told = subprocess.run(
        [sys.executable, "-c", PRINTS_THREADS],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split() == [str(default), "2"]


def test_engine_takes_the_threads_of_its_settings() -> None:
    before = torch.get_num_threads()
    try:
        settings = by_short_names(TorchSettings, threads=before + 1, kv_cache_tokens=4096)
        load_engine(DEMO, weight_files(DEMO), settings)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


# Short rows, and long ones with and without numbers after the last whole block.
@pytest.mark.parametrize("size", [40, 6144, 40_000, 40_007])
@pytest.mark.parametrize("count", [1, 2, 40])
def test_top_finds_the_highest_numbers_in_order(size: int, count: int) -> None:
    rows = torch.randn(5, size, generator=torch.Generator().manual_seed(1))
    rows[1] = rows[1].round()
    rows[2, 1:] = -torch.inf
    rows[3, -3:] = 9.0
    assert torch.equal(top(rows, count), rows.topk(count, dim=1).values)
