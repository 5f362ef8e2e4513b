"""Pickled weights in every layout and with every damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GPT2 = "pytorch_model.bin"


def old_layout(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names in the first gpt2's pickle, with the masks that it holds."""
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 512, 512).tril() for layer in range(2)}
    return masks | {name.removeprefix("transformer."): each for name, each in weights.items()}


def tied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {**weights, "lm_head.weight": weights["transformer.wte.weight"]}


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
    "nothing": (lambda *_: None, "has neither pytorch_model.bin nor"),
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
