"""`trtmesh convert`, with real pickles and the engine that serves the result."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cli.commands import TRTMESH, running_stack, trtmesh
from oracle.tiny_models import build
from safetensors.torch import load_file
from torch import Tensor
from trtmesh.client import Client

GPT2 = "pytorch_model.bin"


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


def old_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names in the first gpt2's pickle, with the masks that it holds."""
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 512, 512).tril() for layer in range(2)}
    return masks | {name.removeprefix("transformer."): each for name, each in weights.items()}


def tied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "lm_head.weight": weights["transformer.wte.weight"]}


def made(directory: Path) -> list[str]:
    """The names of written files and of the hidden directory that they come from."""
    return sorted(path.name for path in directory.iterdir() if path.name.startswith((".", "model")))


def test_weights_are_as_readable_as_the_pickle(directory: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, directory / GPT2)
    (directory / GPT2).chmod(0o644)
    assert trtmesh("convert", str(directory)).returncode == 0
    assert (directory / "model.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("layout", [dict, tied, old_layout])
@pytest.mark.parametrize("zipped", [True, False])
def test_weights_are_equal(
    directory: Path,
    weights: dict[str, Tensor],
    layout: Callable[[Mapping[str, Tensor]], dict[str, Tensor]],
    zipped: bool,
) -> None:
    content = layout(weights)
    torch.save(content, directory / GPT2, _use_new_zipfile_serialization=zipped)
    result = trtmesh("convert", str(directory))
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {directory / 'model.safetensors'}\n"
    written = load_file(directory / "model.safetensors")
    assert written.keys() == content.keys()
    assert all(torch.equal(written[name], content[name]) for name in content)
    assert (directory / GPT2).exists()
    assert made(directory) == ["model.safetensors"]


def sharded(directory: Path, weights: Mapping[str, Tensor], **index: Any) -> Path:
    names = sorted(weights)
    places: dict[str, str] = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, directory / file)
        places |= dict.fromkeys(part, file)
    content = {"metadata": {"total_size": 1}, "weight_map": places | index}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(content))
    return directory


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
    models = (original, directory, shards)
    flags = ("--backend", "torch", "--port", "0", "--model", str(original))
    with running_stack(*flags, "--models", f"{directory},{shards}") as stack:
        async with Client(stack.wait_ready()) as client:
            texts = [
                (await client.complete(["The quick"], model=each.name, max_tokens=24))[0].text
                for each in models
            ]
    assert texts[0]
    assert texts == texts[:1] * 3


def test_worker_names_the_command(directory: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, directory / GPT2)
    result = trtmesh("up", "--backend", "torch", "--port", "0", "--model", str(directory))
    assert result.returncode == 4
    assert f"trtmesh convert {directory}" in result.stderr.splitlines()[-1]


def test_existing_safetensors_are_replaced_by_force_alone(
    directory: Path, weights: dict[str, Tensor]
) -> None:
    sharded(directory, weights)
    assert trtmesh("convert", str(directory)).returncode == 0
    (directory / "pytorch_model.bin.index.json").unlink()
    torch.save(weights, directory / GPT2)
    refused = trtmesh("convert", str(directory))
    assert refused.returncode == 2
    assert "--force replaces it" in refused.stderr
    assert trtmesh("convert", "--force", str(directory)).returncode == 0
    assert made(directory) == ["model.safetensors"]


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "executed"

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


def torn(directory: Path, weights: Mapping[str, Tensor]) -> None:
    torch.save(weights, directory / GPT2)
    content = (directory / GPT2).read_bytes()
    (directory / GPT2).write_bytes(content[: len(content) // 2])


def missing_shard(directory: Path, weights: Mapping[str, Tensor]) -> None:
    (sharded(directory, weights) / "pytorch_model-00002-of-00002.bin").unlink()


def outside(directory: Path, weights: Mapping[str, Tensor]) -> None:
    torch.save({"a": torch.ones(1)}, directory.parent / "other.bin")
    sharded(directory, weights, a="../other.bin")


def misplaced(directory: Path, weights: Mapping[str, Tensor]) -> None:
    sharded(directory, weights, a="pytorch_model-00001-of-00002.bin")


UNUSABLE: Mapping[str, tuple[Callable[[Path, Mapping[str, Tensor]], object], str]] = {
    "nothing": (lambda *_: None, "has no pytorch_model"),
    "torn": (torn, "is torn"),
    "empty": (lambda d, _: (d / GPT2).touch(), "is torn"),
    "text": (lambda d, _: (d / GPT2).write_text("version https://git-lfs"), "is torn"),
    "code": (lambda d, _: torch.save({"a": Evil(d)}, d / GPT2), "asks for posix.system"),
    "old code": (
        lambda d, _: torch.save({"a": Evil(d)}, d / GPT2, _use_new_zipfile_serialization=False),
        "holds more than weights",
    ),
    "list": (lambda d, _: torch.save([torch.ones(1)], d / GPT2), "holds no tensors by name"),
    "number": (lambda d, _: torch.save({"a": 1}, d / GPT2), "holds int at 'a'"),
    "sparse": (
        lambda d, _: torch.save({"a": torch.ones(2).to_sparse()}, d / GPT2),
        "sparse or quantized",
    ),
    "missing shard": (missing_shard, "lacks it"),
    "file elsewhere": (outside, "no file of the directory"),
    "misplaced tensor": (misplaced, "lacks a, which"),
    "index": (
        lambda d, w: (sharded(d, w) / "pytorch_model.bin.index.json").write_text("{}"),
        "is not an index",
    ),
}


@pytest.mark.parametrize("damage", UNUSABLE)
def test_unusable_weights_are_one_error(
    directory: Path, weights: dict[str, Tensor], damage: str
) -> None:
    prepare, complaint = UNUSABLE[damage]
    prepare(directory, weights)
    result = trtmesh("convert", str(directory))
    assert result.returncode == 4, result.stderr
    (line,) = result.stderr.splitlines()
    assert complaint in line
    assert "weights_only" not in line
    assert not (directory / "executed").exists()
    assert made(directory) == []


def test_full_disk_is_one_error(directory: Path, weights: dict[str, Tensor]) -> None:
    """A limit of the size of files stands for the disk."""
    torch.save(weights, directory / GPT2)
    result = subprocess.run(
        [TRTMESH, "convert", str(directory)],
        check=False,
        capture_output=True,
        text=True,
        # The limit would tear the bytecode too.
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )
    assert result.returncode == 1, result.stderr
    (line,) = result.stderr.splitlines()
    assert "cannot write model.safetensors" in line
    assert made(directory) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_conversion_leaves_nothing(
    directory: Path, weights: dict[str, Tensor], number: signal.Signals
) -> None:
    """The conversion still imports PyTorch when its directory appears."""
    torch.save(weights, directory / GPT2)
    process = subprocess.Popen([TRTMESH, "convert", str(directory)])
    while not made(directory):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait() == 130
    assert made(directory) == []


def test_endless_conversion_ends(directory: Path, weights: dict[str, Tensor]) -> None:
    torch.save(weights, directory / GPT2)
    result = trtmesh("convert", str(directory), "--seconds", "0.1")
    assert result.returncode == 1
    assert "--seconds allows more" in result.stderr
    assert made(directory) == []
