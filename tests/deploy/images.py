"""The images under test, built from the tracked files of the repository."""

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
"""Not `latest`, which operators run."""


def container_engine() -> str:
    """The program that runs containers."""
    return os.environ.get("CONTAINER_ENGINE", "docker")


def compose_command() -> list[str]:
    return shlex.split(os.environ.get("COMPOSE", f"{container_engine()} compose"))


def why_not() -> str:
    """The reason why containers cannot run here; '' if they can."""
    for command in ([container_engine(), "info"], [*compose_command(), "version"]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        if done.returncode:
            return f"{shlex.join(command)} failed: {done.stderr.strip()[-200:]}"
    return ""


def build_images() -> None:
    """Builds as `make images` does and prints its output."""
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
    """A copy of the tracked files with their uncommitted changes.

    Without git or a history, as in a release, the repository itself.
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
