"""Logs of the processes of a stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.child import Log
from trtmesh.cli.output import say


def to_terminal(name: str, line: str) -> None:
    """Prints a line after the name of its process."""
    say(f"{name:<11} | {line}")


@contextmanager
def process_log(directory: Path | None) -> Iterator[Log]:
    """Logs to the terminal, or to one file per process in `directory`."""
    if directory is None:
        yield to_terminal
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"is {str(directory)!r}, which cannot be made: {error.strerror}", setting="mesh.log_dir"
        ) from error
    files: dict[str, BinaryIO] = {}
    unwritten: set[str] = set()
    with ExitStack() as open_files:

        def to_file(name: str, line: str) -> None:
            path = directory / f"{name}.log"
            try:
                if name not in files:
                    files[name] = open_files.enter_context(path.open("ab", buffering=0))
                files[name].write(f"{line}\n".encode())
                unwritten.discard(name)
            except OSError as error:
                # Raising would stop the reader, and the process would block on its full pipe.
                if name not in unwritten:
                    say(f"lines are lost: {path} cannot be written: {error.strerror}")
                unwritten.add(name)

        yield to_file
