"""Logs of the processes of a stack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.child import Log
from trtmesh.cli.output import say

STARTING, SERVING = "chassis.health: starting", "chassis.health: serving"
"""Lines of a process's log in the form `text`, from the logger's name on."""


class TerminalLog:
    """Prints lines after the names of their processes, without the start, the addresses and the readiness of a process:
    the command prints these facts already."""

    def __init__(self) -> None:
        self._starting: set[str] = set()

    def __call__(self, name: str, line: str) -> None:
        _, _, message = line.partition(" - trtmesh.")
        if message == STARTING:
            self._starting.add(name)
        elif name in self._starting and message == SERVING:
            self._starting.remove(name)
        elif name not in self._starting or ": listening " not in message:
            say(f"{name:<11} | {line}")


@contextmanager
def process_log(directory: Path | None) -> Iterator[Log]:
    """Logs to the terminal, or to a file per process in `directory`."""
    if directory is None:
        yield TerminalLog()
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
                # Raising would stop the reader, and the process would block on a full pipe.
                if name not in unwritten:
                    say(f"lines are lost: {path} cannot be written: {error.strerror}")
                unwritten.add(name)

        yield to_file
