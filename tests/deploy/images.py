"""The images under test: built from the files that the repository keeps, by what builds and runs containers here."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
TAG = "test"
"""Not `latest`, which is what an operator runs."""


def container_engine() -> str:
    """The program that runs containers."""
    return os.environ.get("CONTAINER_ENGINE", "docker")


def compose_command() -> list[str]:
    return shlex.split(os.environ.get("COMPOSE", f"{container_engine()} compose"))


def why_not() -> str:
    """Why containers cannot run here; '' when they can."""
    for command in ([container_engine(), "info"], [*compose_command(), "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        if done.returncode:
            return f"{shlex.join(command)} failed: {done.stderr.strip()[-200:]}"
    return ""


def build_images() -> None:
    """Builds as `make images` does, and shows what that prints."""
    with kept_files() as context:
        subprocess.run(
            [
                *("make", "--no-print-directory", "images", f"TAG={TAG}", f"CONTEXT={context}"),
                f"CONTAINER_ENGINE={container_engine()}",
            ],
            cwd=ROOT,
            check=True,
        )


@contextmanager
def kept_files() -> Iterator[Path]:
    """The repository as a clone of it would be, with changes that are not committed yet, but nothing that is untracked.

    What has no history, such as a release, is taken as it is, and so is everything where git is not installed.
    """
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        yield ROOT
        return
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    with TemporaryDirectory() as directory:
        for name in filter(None, listed.stdout.split("\0")):
            copy = Path(directory, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy, follow_symlinks=False)
        yield Path(directory)
