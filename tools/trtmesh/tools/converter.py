"""Runs a conversion of files in a process of the engine's package, and publishes its files together."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import typer
from trtmesh.chassis.errors import ModelUnusable, StartupError
from trtmesh.cli.extras import check_extras
from trtmesh.cli.output import put, say_error
from trtmesh.cli.session import INTERRUPTED


def tell_written(convert: Callable[[], Sequence[Path]]) -> None:
    """Prints the files of a conversion, or its error and the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for file in convert():
            put(f"wrote {file}")
    except StartupError as error:
        say_error(str(error))
        raise typer.Exit(error.exit_status) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def convert_files(
    module: str,
    source: Path,
    directory: Path,
    *options: str,
    like: Path,
    old: Sequence[Path],
    seconds: float,
) -> Sequence[Path]:
    """Converts `source` into files of `directory`, as readable as `like`, and removes the old ones. Returns the new
    files."""
    # A signal may strike after any call, the one that makes the directory too, so its name is known before.
    hidden = directory / f".convert-{secrets.token_hex(8)}"
    try:
        hidden.mkdir(mode=0o700)
        _run_converter(module, [str(source), str(hidden), *options], seconds)
        for file in hidden.iterdir():
            # safetensors writes files that only their owner may read.
            shutil.copymode(like, file)
        return _publish(hidden, directory, old)
    finally:
        try:
            shutil.rmtree(hidden, ignore_errors=True)
        finally:
            # A signal has ended the first removal, or nothing is left.
            shutil.rmtree(hidden, ignore_errors=True)


def _run_converter(module: str, arguments: Sequence[str], seconds: float) -> None:
    """Runs a conversion to its end, and ends it on every other path."""
    check_extras(["engine"])
    command = [sys.executable, "-m", module, *arguments]
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
