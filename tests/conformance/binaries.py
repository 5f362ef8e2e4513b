"""Programs of others, found by a variable or on PATH. The tests of those not found are skipped."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Binary:
    """A program, and the variable that may name it."""

    variable: str
    name: str

    @property
    def path(self) -> str | None:
        return os.environ.get(self.variable) or shutil.which(self.name)

    @property
    def needed(self) -> pytest.MarkDecorator:
        """Marks tests to be skipped without the program."""
        reason = f"no {self.name}: set {self.variable} or put it on PATH"
        return pytest.mark.skipif(not self.path, reason=reason)

    async def run(self, *arguments: str, seconds: float) -> tuple[int, str]:
        """Exit status and output."""
        assert self.path
        process = await asyncio.create_subprocess_exec(
            self.path,
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(seconds):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return process.returncode, output.decode("utf-8", "replace")


H2SPEC = Binary("H2SPEC", "h2spec")
H2SPEC_GRPC = Binary("H2SPEC_GRPC", "h2spec-grpc")
"""h2spec with POST requests of gRPC, which reach handlers."""

GRPC_INTEROP_CLIENT = Binary("GRPC_INTEROP_CLIENT", "interop_client")
"""The interop client of grpc-go."""
