"""Environments with one gRPC library each, kept below `.compat-clients/`."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import environments
from environments import node_environment, python_environment

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".compat-clients"
HERE = Path(__file__).parent
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
        """The beginning of a case's command line."""
        python = python_environment(KEPT / self.name, self.requirements)
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
        """The beginning of a case's command line."""
        node_environment(KEPT / self.name, HERE / "grpc_js")
        return [shutil.which("node") or "node", str(HERE / "grpc_js" / self.script)]

    def environment(self) -> dict[str, str]:
        modules = str(KEPT / self.name / "node_modules")
        return {**os.environ, "NODE_PATH": modules, "PROTOS": str(ROOT / "protos")}


Client = PythonClient | NodeClient

CLIENTS: tuple[Client, ...] = (
    # The oldest release of which 60 MiB answers are expected, and the newest.
    PythonClient("grpcio-1.49.1", "grpcio", ("grpcio==1.49.1", PROTOBUF)),
    PythonClient("grpcio-newest", "grpcio", ("grpcio", PROTOBUF)),
    PythonClient("grpclib", "grpclib", ("grpclib", PROTOBUF), missing=("compressed",)),
    NodeClient(),
)


async def run(client: Client, *arguments: str) -> None:
    """Runs a program of the environment."""
    command = await asyncio.to_thread(client.command)
    await environments.run([*command, *arguments], client.environment(), CASE_SECONDS)
