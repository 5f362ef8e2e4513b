"""Where the lines that the processes of the stack write go."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.child import Log


def to_terminal(name: str, line: str) -> None:
    """Every line behind the name of its process."""
    sys.stderr.write(f"{name:<11} | {line}\n")
    sys.stderr.flush()


@contextmanager
def process_log(directory: Path | None) -> Iterator[Log]:
    """The terminal, or one file a process in `directory`."""
    if directory is None:
        yield to_terminal
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"mesh.log_dir {directory} cannot be made: {error.strerror}") from error
    files: dict[str, TextIO] = {}
    with ExitStack() as open_files:

        def to_file(name: str, line: str) -> None:
            if name not in files:
                file = (directory / f"{name}.log").open("a", encoding="utf-8", buffering=1)
                files[name] = open_files.enter_context(file)
            files[name].write(f"{line}\n")

        yield to_file
