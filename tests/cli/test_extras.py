"""Commands without the optional parts of the package name the extras to install."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cli.commands import FREE_PORTS, trtmesh
from e2e.mesh import DEMO


def without(
    modules: tuple[str, ...], folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command that finds none of the modules."""
    hidden = dict.fromkeys(modules)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update({hidden!r})\n")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return trtmesh(*arguments, env={"PYTHONPATH": path})


@pytest.mark.parametrize(
    ("flags", "extras"),
    [
        (("--backend", "torch"), "tokenizer,engine"),
        (("--backend", "simulated"), "tokenizer"),
        (("--engines-at", "vllm://127.0.0.1:1"), "tokenizer,foreign"),
        (("--engines-at", "vllm://127.0.0.1:1", "--engines", "1"), "tokenizer,engine,foreign"),
    ],
)
def test_up_names_those_of_its_parts(tmp_path: Path, flags: tuple[str, ...], extras: str) -> None:
    given = (*FREE_PORTS, *flags, "--model", str(DEMO))
    result = without(("tokenizers", "torch", "smg_grpc_proto"), tmp_path, "up", *given)
    assert result.returncode == 1
    assert f"pip install 'trtmesh[{extras}]'" in result.stderr


@pytest.mark.parametrize("module", ["jinja2", "numpy", "psutil"])
def test_bench_names_its_own(tmp_path: Path, module: str) -> None:
    """Other packages bring some of it."""
    result = without((module,), tmp_path, "bench", "serve", "grpc://127.0.0.1:1")
    assert result.returncode == 1
    assert "pip install 'trtmesh[bench]'" in result.stderr
