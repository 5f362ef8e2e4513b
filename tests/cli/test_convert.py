"""`trtmesh convert`, with real pickles and the backend that serves the result."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cli.commands import held_conversions, running, trtmesh
from engine.torch.harness import configure
from engine.torch.harness import running as running_engine
from engine.torch.model.pickled import GPT2, UNUSABLE, old_layout, sharded, tied
from oracle.tiny_models import build
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt2 with safetensors, as transformers saves it."""
    return build(tmp_path_factory.mktemp("gpt2"), "gpt2", tie_word_embeddings=True)


@pytest.fixture
def weights(original: Path) -> dict[str, Tensor]:
    return load_file(original / "model.safetensors")


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    """The model's directory without weights."""
    copy = tmp_path / "copy"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


def made(directory: Path) -> list[str]:
    """The names of written files and of the hidden directory that they come from."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith((".", "model")))


def test_pickle_stays_beside_the_equal_weights(directory: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, directory / GPT2)
    (directory / GPT2).chmod(0o644)
    result = trtmesh("convert", str(directory))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {directory / 'model.safetensors'}\n"
    # As readable as the pickle.
    assert (directory / "model.safetensors").stat().st_mode & 0o777 == 0o644
    written = load_file(directory / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    assert (directory / GPT2).exists()
    assert made(directory) == ["model.safetensors"]


async def test_converted_models_generate_the_same_tokens(
    original: Path, directory: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(directory, shards)
    torch.save(old_layout(weights), directory / GPT2)
    assert trtmesh("convert", str(directory)).returncode == 0
    result = trtmesh("convert", str(sharded(shards, tied(weights))))
    assert [Path(line.removeprefix("wrote ")).name for line in result.stdout.splitlines()] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    tokens = []
    for model in (original, directory, shards):
        async with running_engine(model) as engine:
            tokens += await engine.run([[5, 6, 7]], configure(max_tokens=24, ignore_end_id=True))
    assert len(tokens[0]) == 24
    assert tokens == tokens[:1] * 3


def test_worker_names_the_command(directory: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, directory / GPT2)
    result = trtmesh("up", "--backend", "torch", "--port", "0", "--model", str(directory))
    assert result.returncode == 4
    assert f"trtmesh convert {directory}" in result.stderr.splitlines()[-1]


def test_existing_safetensors_are_replaced_by_force_alone(
    directory: Path, weights: dict[str, Tensor]
) -> None:
    torch.save(weights, directory / GPT2)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for name in (*shards, "model.safetensors.index.json"):
        (directory / name).touch()
    refused = trtmesh("convert", str(directory))
    assert refused.returncode == 2
    assert "--force replaces it" in refused.stderr
    assert trtmesh("convert", "--force", str(directory)).returncode == 0
    assert made(directory) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [("nothing", "has no pytorch_model"), ("torn", "is torn"), ("code", "asks for posix.system")],
)
def test_unusable_weights_are_one_error(
    directory: Path, weights: dict[str, Tensor], damage: str, complaint: str
) -> None:
    prepare, _ = UNUSABLE[damage]
    prepare(directory, weights)
    result = trtmesh("convert", str(directory))
    assert result.returncode == 4, result.stderr
    (line,) = result.stderr.splitlines()
    assert complaint in line
    assert "weights_only" not in line
    assert not (directory / "executed").exists()
    assert made(directory) == []


LIMITED = """
import resource, sys
# The limit would tear the bytecode too.
sys.dont_write_bytecode = True
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""


def test_full_disk_is_one_error(
    directory: Path, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """A limit of the size of files stands for the disk."""
    torch.save(weights, directory / GPT2)
    starts = tmp_path / "starts"
    starts.mkdir()
    (starts / "sitecustomize.py").write_text(LIMITED)
    path = os.pathsep.join([str(starts), os.environ.get("PYTHONPATH", "")])
    result = trtmesh("convert", str(directory), env={"PYTHONPATH": path})
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert "cannot write model.safetensors" in line
    assert made(directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_conversion_leaves_nothing(
    directory: Path, weights: dict[str, Tensor], tmp_path: Path, number: signal.Signals
) -> None:
    torch.save(weights, directory / GPT2)
    env = held_conversions(tmp_path / "starts")
    with running("convert", str(directory), env=env) as command:
        while not made(directory):
            assert command.popen.poll() is None
            time.sleep(0.01)
        command.signal(number)
        assert command.wait() == 130
        assert command.left_nothing()
    assert made(directory) == []


STRUCK = """
import os, signal, sys
moment = sys.argv.pop(1)
change = getattr(os, moment)

def struck(*given, **more):
    setattr(os, moment, change)
    if moment == "mkdir":
        change(*given, **more)
    os.kill(os.getpid(), signal.SIGINT)

setattr(os, moment, struck)
from trtmesh.cli.main import main
main()
"""
"""The command with Ctrl-C right after its directory appears, or as it removes that."""


@pytest.mark.parametrize("moment", ["mkdir", "rmdir"])
def test_no_moment_of_an_interrupt_leaves_the_directory(
    directory: Path, weights: dict[str, Tensor], moment: str
) -> None:
    torch.save(weights, directory / GPT2)
    command = [sys.executable, "-c", STRUCK, moment, "convert", str(directory), "--seconds", "0"]
    assert subprocess.run(command, check=False).returncode == 130
    assert made(directory) == []


def test_endless_conversion_ends(directory: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, directory / GPT2)
    result = trtmesh("convert", str(directory), "--seconds", "0")
    assert result.returncode == 1
    assert "--seconds allows more" in result.stderr
    assert made(directory) == []
