"""Service processes of this tree and of another revision, side by side."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from processes import ON_ONE_HOST

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 180.0


@dataclass(frozen=True)
class Tree:
    """Code of services, run with the libraries of this environment."""

    name: str
    folder: Path

    @classmethod
    def of_revision(cls, revision: str, folder: Path) -> Tree:
        """Unpacks a revision into a folder."""
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
        )
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        return cls(revision, folder)

    @property
    def environment(self) -> Mapping[str, str]:
        """Its packages come before those installed here, whose portions of the namespace have the same names."""
        roots = [self.folder / "protos", self.folder / "tools", *(self.folder / "services").iterdir()]  # fmt: skip
        return {**os.environ, **ON_ONE_HOST, "PYTHONPATH": os.pathsep.join(map(str, roots))}

    def check(self) -> None:
        """Raises AssertionError unless processes of this tree run its code."""
        code = "import trtmesh.router, trtmesh.engine; print(trtmesh.router.__path__[0])"
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, env=self.environment, check=True, capture_output=True)
        assert ran.stdout.decode().startswith(str(self.folder)), ran.stdout

    async def start(self, service: str, *flags: str) -> TreeProcess:
        """Starts a service on free ports, and waits for its address."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"trtmesh.{service}", "--port", "0", "--log-level", "warning"),
            *flags,
            env=self.environment,
            stdout=subprocess.PIPE,
        )
        assert process.stdout
        try:
            line = await process.stdout.readline()
            assert line, f"{service} of {self.name} ended at its start"
        except BaseException:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        return TreeProcess(self, service, flags, process, json.loads(line))


@dataclass(frozen=True)
class TreeProcess:
    """A running service."""

    tree: Tree
    service: str
    flags: Sequence[str]
    process: asyncio.subprocess.Process
    announced: Mapping[str, str]

    @property
    def address(self) -> str:
        return self.announced["address"]

    async def drain(self) -> None:
        """Ends the process as an orchestrator does. Raises AssertionError for an unclean end."""
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_SECONDS):
            assert await self.process.wait() == 0, f"{self.service} of {self.tree.name}"

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
