"""`trtmesh convert`: safetensors files from the pickled weights of a model directory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from trtmesh.chassis.errors import ModelUnusable, SettingsError, StartupError
from trtmesh.tools.converter import convert_files, tell_written

PICKLES, SAFE = "pytorch_model*.bin", "model*.safetensors"
INDEX = "model.safetensors.index.json"
CONVERTER = "trtmesh.engine.backends.torch.model.pickles"


def convert(
    directory: Annotated[
        Path, typer.Argument(help="Model directory with pytorch_model.bin or its shards.")
    ],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="Replace existing model*.safetensors.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Longest duration.")] = 3600,
) -> None:
    """Write the weights in pytorch_model.bin as safetensors, which engines serve.

    Nothing in a pickle runs: a process of its own loads tensors and refuses everything else. The files appear in
    DIRECTORY together, once all are written; the pickles stay.

    Exit status: 0 converted, 1 not enough space or time, 2 safetensors exist, 4 unusable weights, 130 Ctrl-C.
    """
    tell_written(lambda: _convert(directory, replace=force, seconds=seconds))


def _convert(directory: Path, *, replace: bool, seconds: float) -> Sequence[Path]:
    """The new files. Raises StartupError."""
    old = _existing(directory)
    if old and not replace:
        raise SettingsError(f"{old[0]} exists; --force replaces it")
    pickles = _pickles(directory)
    try:
        return convert_files(
            CONVERTER, directory, directory, like=pickles[0], old=old, seconds=seconds
        )
    except OSError as error:
        raise StartupError(f"cannot write to {directory}: {error.strerror}") from error


def _existing(directory: Path) -> list[Path]:
    index = directory / INDEX
    return [*sorted(directory.glob(SAFE)), *([index] if index.exists() else [])]


def _pickles(directory: Path) -> Sequence[Path]:
    """The pickles, with space for their weights. Raises StartupError."""
    if not directory.is_dir():
        raise ModelUnusable(f"{directory} is no directory")
    pickles = [file for file in directory.glob(PICKLES) if file.is_file()]
    if not pickles:
        raise ModelUnusable(f"{directory} has no {PICKLES}")
    needed = sum(file.stat().st_size for file in pickles)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise StartupError(f"{directory} has {free} bytes of free space, of about {needed} needed")
    return pickles
