"""`trtmesh convert`: safetensors files from the pickled weights of a model directory."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from trtmesh.chassis.errors import ModelUnusable, SettingsError, StartupError
from trtmesh.cli.output import put, say_error
from trtmesh.cli.session import INTERRUPTED

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
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for file in _convert(directory, replace=force, seconds=seconds):
            put(f"wrote {file}")
    except StartupError as error:
        say_error(str(error))
        raise typer.Exit(error.exit_status) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _convert(directory: Path, *, replace: bool, seconds: float) -> Sequence[Path]:
    """The new files. Raises StartupError."""
    old = _existing(directory)
    if old and not replace:
        raise SettingsError(f"{old[0]} exists; --force replaces it")
    pickles = _pickles(directory)
    try:
        with TemporaryDirectory(dir=directory, prefix=".convert-") as target:
            _run(directory, Path(target), seconds)
            for file in Path(target).iterdir():
                # safetensors writes files that only their owner may read.
                shutil.copymode(pickles[0], file)
            return _publish(Path(target), directory, old)
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


def _run(directory: Path, target: Path, seconds: float) -> None:
    """Runs the conversion to its end, and ends it on every other path."""
    command = [sys.executable, "-m", CONVERTER, str(directory), str(target)]
    # The conversion ends with its standard input, and so with this process.
    reading, writing = os.pipe()
    try:
        with subprocess.Popen(  # noqa: S603 - this project, with two paths
            command, stdin=reading, stderr=subprocess.PIPE
        ) as process:
            try:
                errors = process.communicate(timeout=seconds)[1]
            finally:
                process.kill()
    except subprocess.TimeoutExpired as error:
        raise StartupError(
            f"the conversion takes longer than {seconds:g} s; --seconds allows more"
        ) from error
    finally:
        os.close(reading)
        os.close(writing)
    if process.returncode:
        raise _failure(process.returncode, str(errors, "utf-8", "replace"))


def _failure(status: int, errors: str) -> StartupError:
    reason = (errors.splitlines() or ["it printed no reason"])[-1]
    if status == ModelUnusable.exit_status:
        return ModelUnusable(reason)
    if status == StartupError.exit_status:
        return StartupError(reason)
    return StartupError(f"the conversion ended with status {status}: {reason}")


def _publish(source: Path, directory: Path, old: Sequence[Path]) -> Sequence[Path]:
    """Moves the files, the index last, and removes the old ones."""
    files = sorted(source.iterdir(), key=lambda file: (file.suffix == ".json", file.name))
    for file in files:
        with file.open("rb+") as written:
            os.fsync(written.fileno())
    placed: list[Path] = []
    try:
        placed.extend(file.rename(directory / file.name) for file in files)
    except OSError:
        for file in placed:
            file.unlink()
        raise
    for file in old:
        if file not in placed:
            file.unlink()
    return placed
