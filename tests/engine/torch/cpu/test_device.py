"""Threads of a CPU operation: the setting, else OMP_NUM_THREADS, else what suits the weights and the cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from e2e.mesh import DEMO_DRAFT
from engine.short_names import by_short_names
from trtmesh.chassis.cores import physical_cores
from trtmesh.engine.backends.torch.cpu.device import take_threads, top
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.model.weights import weight_files
from trtmesh.engine.backends.torch.settings import TorchSettings


def started(program: str, **given: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that begins as an engine does, with these variables of OpenMP."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    return subprocess.run(
        [sys.executable, "-c", f"import trtmesh.engine.__main__, {program}"],
        env=environment | given,
        capture_output=True,
        text=True,
        check=True,
    )


def test_waiting_threads_of_an_engine_sleep_unless_told_otherwise() -> None:
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libgomp" in line)
    loads = f"ctypes; ctypes.CDLL({library!r})"
    assert "GOMP_SPINCOUNT = '0'" in started(loads, OMP_DISPLAY_ENV="verbose").stderr
    told = started("os; print(os.environ['OMP_WAIT_POLICY'])", OMP_WAIT_POLICY="active")
    assert told.stdout == "active\n"


@pytest.mark.parametrize(
    ("variable", "threads"), [("", [physical_cores(), 1, 2]), ("1", [1, 1, 2])], ids=["unset", "1"]
)
def test_threads_follow_settings_variables_weights_and_cores(
    variable: str, threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    before, found = torch.get_num_threads(), []
    try:
        # As torch takes the variable.
        torch.set_num_threads(int(variable or 1))
        for setting, weights in ((0, 10**12), (0, 10**6), (2, 10**6)):
            take_threads(setting, weights)
            found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert found == threads


def test_engine_takes_the_threads_of_its_settings() -> None:
    before = torch.get_num_threads()
    try:
        settings = by_short_names(TorchSettings, threads=before + 1, kv_cache_tokens=4096)
        load_engine(DEMO_DRAFT, weight_files(DEMO_DRAFT), settings)
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
