"""Stand-in engines behind a contract, in this process or in one of their own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from foreign.engine import StandInEngine
from foreign.servicers import ADDERS, SERVICERS, Servicer
from forks import fork_server, start_module

TESTS = Path(__file__).parents[1]


@dataclass
class StandIn:
    """A served engine of this process."""

    contract: str
    address: str
    servicer: Servicer
    server: grpc.aio.Server

    @property
    def engine(self) -> StandInEngine:
        return self.servicer.engine

    @property
    def url(self) -> str:
        return f"{self.contract}://{self.address}"


@asynccontextmanager
async def stand_in(
    contract: str, *, step_seconds: float = 0.0, port: int = 0, **options: Any
) -> AsyncIterator[StandIn]:
    engine = StandInEngine(step_seconds)
    servicer = SERVICERS[contract](engine, **options)
    server = grpc.aio.server()
    ADDERS[contract](servicer, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield StandIn(contract, f"127.0.0.1:{bound}", servicer, server)
    finally:
        await server.stop(0)
        await engine.close()


@dataclass
class ForeignProcess:
    """An engine in a process of its own."""

    url: str
    process: subprocess.Popen[bytes]

    async def kill(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait)


@asynccontextmanager
async def foreign_process(
    contract: str, *, step_seconds: float = 0.01, port: int = 0, kv_role: str = ""
) -> AsyncIterator[ForeignProcess]:
    server = fork_server(("foreign.servicers",))
    await asyncio.to_thread(server.wait_ready)
    arguments = (contract, str(port), str(step_seconds), kv_role)
    with start_module(
        *(server, "foreign.worker", arguments, os.environ),
        cwd=TESTS,
        stdin=subprocess.DEVNULL,
        stderr=None,
    ) as process:
        assert process.stdout
        try:
            address = (await asyncio.to_thread(process.stdout.readline)).decode().strip()
            assert address, f"the {contract} process ended before it served"
            yield ForeignProcess(f"{contract}://{address}", process)
        finally:
            process.kill()
