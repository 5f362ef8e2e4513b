"""Weight files are checked by their headers: before torch is imported, and without reading weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.mesh import DEMO
from transformers import CONFIG_MAPPING
from trtmesh.chassis.errors import ModelUnusable
from trtmesh.engine.backends.torch.model.weights import known_types, weight_files


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def refusal(model_dir: Path) -> str:
    with pytest.raises(ModelUnusable) as caught:
        weight_files(model_dir)
    return str(caught.value)


@pytest.mark.parametrize("change", [-1, 1])
def test_files_have_the_size_that_the_header_tells(copy: Path, change: int) -> None:
    file = copy / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size + change)
    assert f"has {size + change} bytes of {size}" in refusal(copy)


@pytest.mark.parametrize(
    "header", [b"", b"{", b"[]", b'{"a": {}}', b'{"a": {"data_offsets": "x"}}']
)
def test_broken_headers(copy: Path, header: bytes) -> None:
    (copy / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert "no header" in refusal(copy)


def test_missing_file_of_a_divided_model(copy: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors, which is missing" in refusal(copy)


def test_missing_layers(copy: Path) -> None:
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 9}))
    assert "num_hidden_layers is 9, but the files have 8 layers" in refusal(copy)


PROGRAM = """
import sys
sys.modules["torch"] = None
sys.argv[1:] = ["--backend", "torch", "--model-dir", {folder!r}]
import runpy
runpy.run_module("trtmesh.engine", run_name="__main__")
"""


def start_without_torch(model_dir: Path) -> str:
    """The error of an engine that cannot import torch."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=str(model_dir))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "trtmesh engine: error: " in done.stderr
    return done.stderr


def test_torn_file_is_reported_before_torch_is_imported(copy: Path) -> None:
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.truncate(1000)
    assert "model.safetensors is not a readable safetensors file" in start_without_torch(copy)


def test_unknown_model_type_is_reported_before_torch_is_imported(copy: Path) -> None:
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "no-such-type"}))
    assert "model type no-such-type is unknown to transformers" in start_without_torch(copy)


def test_known_model_types_are_those_of_transformers() -> None:
    assert known_types() == set(CONFIG_MAPPING.keys())
