"""Environments of client libraries, made once and kept below a folder that git ignores.

A test that needs an environment which cannot be made is skipped, with the installer's last line as the reason.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

INSTALL_SECONDS = 900.0


def python_environment(place: Path, requirements: Sequence[str]) -> Path:
    """Returns the interpreter of a virtual environment with `requirements`."""
    python = place / "bin" / "python"

    def make() -> None:
        _install(sys.executable, "-m", "venv", str(place))
        quiet = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
        _install(str(python), "-m", "pip", "install", *quiet, *requirements)

    _once(place, "\n".join(requirements), make)
    return python


def node_environment(place: Path, source: Path) -> Path:
    """Returns the folder of the packages that `source/package-lock.json` names."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("no node or no npm on PATH")

    def make() -> None:
        place.mkdir(parents=True)
        for file in ("package.json", "package-lock.json"):
            shutil.copy(source / file, place)
        _install(npm, "--prefix", str(place), "ci", "--silent", "--no-audit", "--no-fund")

    _once(place, (source / "package-lock.json").read_text(), make)
    return place / "node_modules"


def _once(place: Path, wanted: str, make: Callable[[], None]) -> None:
    stamp = place / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        make()
        stamp.write_text(wanted)


def _install(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if done.returncode:
        problem = (done.stderr or done.stdout).strip().splitlines()[-1:]
        pytest.skip(f"{' '.join(command[-3:])} failed: {' '.join(problem)}")


async def run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> str:
    """Runs a program that prints why it fails. Returns what it prints."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )
    try:
        async with asyncio.timeout(seconds):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    printed = output.decode("utf-8", "replace")
    print(printed)
    assert process.returncode == 0, printed
    return printed
