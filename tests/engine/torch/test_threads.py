"""How many threads an operation takes: as the settings say, or else OMP_NUM_THREADS, or else one for each core."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from e2e.mesh import DEMO
from trtmesh.engine.backends.torch.loading import physical_cores

PRINTS_THREADS = """
import torch
from pathlib import Path
from trtmesh.engine.backends.torch.loading import load_engine
from trtmesh.engine.backends.torch.settings import TorchSettings
load_engine(Path("{model_dir}"), TorchSettings(threads={threads}))
print(torch.get_num_threads())
"""


@pytest.mark.parametrize(
    ("setting", "variable", "taken"),
    [(0, "1", 1), (2, "1", 2), (0, None, physical_cores())],
)
def test_what_is_taken(setting: int, variable: str | None, taken: int) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "OMP_NUM_THREADS"}
    if variable is not None:
        environment["OMP_NUM_THREADS"] = variable
    code = PRINTS_THREADS.format(model_dir=DEMO, threads=setting)
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == [str(taken)]
