"""`trtmesh adapters convert`, both ways, with the demo model and its adapters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cli.commands import held_conversions, running, trtmesh
from e2e.mesh import DEMO
from engine.adapters.test_arrays import same
from trtmesh.chassis.adapter_content import FILE_NAMES
from trtmesh.engine.adapters.peft import read_peft
from trtmesh.v1 import generation_pb2 as pb

ADAPTER = DEMO.parent / "demo-adapters" / "docstrings"
PEFT, ARRAYS = FILE_NAMES[pb.ADAPTER_FORMAT_PEFT], FILE_NAMES[pb.ADAPTER_FORMAT_ARRAYS]
MOST = 1 << 30


def convert(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return trtmesh("adapters", "convert", *map(str, arguments))


def test_adapter_there_and_back_is_the_same(tmp_path: Path) -> None:
    there = convert(ADAPTER, tmp_path / "arrays", "--model", DEMO)
    assert there.returncode == 0, there.stderr
    assert there.stdout.splitlines() == [f"wrote {tmp_path / 'arrays' / name}" for name in ARRAYS]
    back = convert(tmp_path / "arrays", tmp_path / "back", "--model", DEMO)
    assert back.returncode == 0, back.stderr
    assert same(read_peft(tmp_path / "back", MOST), read_peft(ADAPTER, MOST))
    mode = (ADAPTER / PEFT[0]).stat().st_mode
    assert {file.stat().st_mode for file in (tmp_path / "back").iterdir()} == {mode}


def test_arrays_need_a_model(tmp_path: Path) -> None:
    for name in ARRAYS:
        (tmp_path / name).touch()
    refused = convert(tmp_path, tmp_path / "back")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--model" in refused.stderr
    assert not (tmp_path / "back").exists()


def test_existing_adapter_is_replaced_by_force_alone(tmp_path: Path) -> None:
    for name in (*PEFT, "README.md"):
        (tmp_path / name).touch()
    refused = convert(ADAPTER, tmp_path)
    assert refused.returncode == 2
    assert "--force replaces it" in refused.stderr
    assert convert(ADAPTER, tmp_path, "--force").returncode == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted((*ARRAYS, "README.md"))


def test_unusable_adapter_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "torn"
    source.mkdir()
    (source / PEFT[0]).write_bytes((ADAPTER / PEFT[0]).read_bytes())
    for weights, word in ((None, PEFT[1]), (b"torn", PEFT[1])):
        if weights is not None:
            (source / PEFT[1]).write_bytes(weights)
        refused = convert(source, tmp_path / "arrays")
        assert refused.returncode == 4
        (line,) = refused.stderr.splitlines()
        assert word in line
        assert not (tmp_path / "arrays").exists()


def test_interrupted_conversion_leaves_nothing(tmp_path: Path) -> None:
    target, env = tmp_path / "arrays", held_conversions(tmp_path / "starts")
    with running("adapters", "convert", str(ADAPTER), str(target), env=env) as command:
        while not (target.is_dir() and any(target.iterdir())):
            assert command.popen.poll() is None
            time.sleep(0.01)
        command.signal(signal.SIGINT)
        assert command.wait() == 130
        assert command.left_nothing()
    assert not target.exists()


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
from trtmesh.cli.main import main
main()
"""
"""The command as in a package without the extra `engine`."""


def test_package_without_the_engine_names_the_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "adapters", "convert"]
    refused = subprocess.run(
        [*command, str(ADAPTER), str(tmp_path / "arrays")],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert refused.returncode == 1
    assert "trtmesh[engine]" in refused.stderr
    assert not (tmp_path / "arrays").exists()
