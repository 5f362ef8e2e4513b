"""Environments with one gRPC library each, made once and kept below `.compat-clients/`."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".compat-clients"
HERE = Path(__file__).parent
INSTALL_SECONDS = 600.0
CASE_SECONDS = 600.0

PROTOBUF = "protobuf>=6.33.5,<8"
"""What the generated messages need."""


@dataclass(frozen=True)
class PythonClient:
    """A virtual environment with `requirements`."""

    name: str
    library: str
    requirements: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """Cases that the library cannot do."""

    def command(self) -> list[str]:
        """The beginning of a case's command line. Skips the test if the environment cannot be made."""
        place = KEPT / self.name
        wanted = "\n".join(self.requirements)
        stamp = place / "installed"
        python = place / "bin" / "python"
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(place, ignore_errors=True)
            install(sys.executable, "-m", "venv", str(place))
            quiet = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:")
            install(str(python), "-m", "pip", "install", *quiet, *self.requirements)
            stamp.write_text(wanted)
        return [str(python), "-m", "compat_clients.python_cases", self.library]

    def environment(self) -> dict[str, str]:
        paths = (str(ROOT / "protos"), str(ROOT / "tests"))
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@dataclass(frozen=True)
class NodeClient:
    """The packages of `grpc_js/package-lock.json`, and a script there."""

    name: str = "grpc-js"
    script: str = "cases.js"
    missing: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The beginning of a case's command line. Skips the test if the environment cannot be made."""
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            pytest.skip("no node or no npm on PATH")
        place, source = KEPT / self.name, HERE / "grpc_js"
        wanted = (source / "package-lock.json").read_text()
        stamp = place / "installed"
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            for file in ("package.json", "package-lock.json"):
                shutil.copy(source / file, place)
            install(npm, "--prefix", str(place), "ci", "--silent", "--no-audit", "--no-fund")
            stamp.write_text(wanted)
        return [node, str(source / self.script)]

    def environment(self) -> dict[str, str]:
        modules = str(KEPT / self.name / "node_modules")
        return {**os.environ, "NODE_PATH": modules, "PROTOS": str(ROOT / "protos")}


Client = PythonClient | NodeClient


def install(*command: str) -> None:
    """Runs a command that needs a registry. Skips the test if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
    )
    if done.returncode:
        problem = (done.stderr or done.stdout).strip().splitlines()[-1:]
        pytest.skip(f"{' '.join(command[-3:])} failed: {' '.join(problem)}")


CLIENTS: tuple[Client, ...] = (
    # The oldest release of which 60 MiB answers are expected, and the newest.
    PythonClient("grpcio-1.49.1", "grpcio", ("grpcio==1.49.1", PROTOBUF)),
    PythonClient("grpcio-newest", "grpcio", ("grpcio", PROTOBUF)),
    PythonClient("grpclib", "grpclib", ("grpclib", PROTOBUF), missing=("compressed",)),
    NodeClient(),
)


async def run(client: Client, *arguments: str) -> None:
    """Runs a program of the environment, which prints why it fails."""
    command = await asyncio.to_thread(client.command)
    process = await asyncio.create_subprocess_exec(
        *command,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=client.environment(),
    )
    try:
        async with asyncio.timeout(CASE_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    print(output.decode("utf-8", "replace"))
    assert process.returncode == 0, output.decode("utf-8", "replace")
