"""Service processes, started as a user would: `python -m trtmesh.<service>`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

START_SECONDS = 240.0
STOP_SECONDS = 120.0

PORT_FLAGS = ("--port", "--admin-port", "--http-port", "--metrics-port")


@dataclass
class ServiceProcess:
    """A process with an announced address."""

    address: str
    admin_address: str
    """'' except for a router."""
    http_address: str
    """'' except for a router with HTTP."""
    metrics_port: int | None
    pid: int
    _process: asyncio.subprocess.Process
    _log: list[str]
    _collecting: asyncio.Task[None]

    @property
    def stderr(self) -> str:
        """The log so far; complete after `wait`."""
        return "".join(self._log)

    @property
    def exit_status(self) -> int | None:
        """None while running; negative for a process killed by a signal."""
        return self._process.returncode

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close_stdin(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

    async def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Waits for the process to end; returns its exit status."""
        async with asyncio.timeout(seconds):
            await asyncio.shield(self._collecting)
            return await self._process.wait()

    async def stop(self) -> int:
        """Sends SIGTERM, as an orchestrator does, and waits for the end."""
        self.signal(signal.SIGTERM)
        return await self.wait()


@asynccontextmanager
async def service_process(
    service: str, *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[ServiceProcess]:
    """Runs `python -m trtmesh.<service> <flags>` on a free port unless `flags` name one; kills it on exit.

    The process announces its address before it serves.
    """
    process = await _start(service, flags, env)
    log: list[str] = []
    collecting = asyncio.create_task(_collect(process, log))
    try:
        assert process.stdout
        with held_ports(flags):
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
        if not line:
            await collecting
            raise AssertionError(f"{service} exited before it announced itself:\n{''.join(log)}")
        announced = json.loads(line)
        yield ServiceProcess(
            address=announced["address"],
            admin_address=announced.get("admin_address", ""),
            http_address=announced.get("http_address", ""),
            metrics_port=announced["metrics_port"],
            pid=announced["pid"],
            _process=process,
            _log=log,
            _collecting=collecting,
        )
    except BaseException:
        # What a failed test shows of the process.
        print(f"--- log of {service} {process.pid} ---\n{''.join(log)}")
        raise
    finally:
        if process.returncode is None:
            process.kill()
        if process.stdin:
            process.stdin.close()
        await collecting
        await process.wait()


@dataclass(frozen=True)
class Exit:
    """The exit status and the output of a process."""

    status: int
    stdout: str
    stderr: str


async def run_to_exit(service: str, *flags: str, env: Mapping[str, str] | None = None) -> Exit:
    """Runs a process to the end, such as a failing start."""
    process = await _start(service, flags, env)
    try:
        async with asyncio.timeout(START_SECONDS):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Exit(process.returncode, stdout.decode(), stderr.decode())


@contextmanager
def held_ports(flags: Sequence[str]) -> Iterator[None]:
    """Keeps the ports that flags name from other processes until the successor of a dead one listens there: they come
    from the range of which the kernel gives ports to connections."""
    named = dict(pairwise(flags))
    with ExitStack() as holding:
        for port in {int(named.get(flag, 0)) for flag in PORT_FLAGS} - {0}:
            holder = holding.enter_context(socket.socket())
            # Both sides have it, so that the process can still listen.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                holder.bind((named.get("--host", "127.0.0.1"), port))
        yield


async def _start(
    service: str, flags: tuple[str, ...], env: Mapping[str, str] | None
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"trtmesh.{service}",
        *flags,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # Concurrent routers must not share the default admin and HTTP ports.
        env={
            **os.environ,
            "TRTMESH_ROUTER_ADMIN_PORT": "0",
            "TRTMESH_ROUTER_HTTP_PORT": "0",
            **(env or {}),
        },
    )


async def _collect(process: asyncio.subprocess.Process, log: list[str]) -> None:
    assert process.stderr
    while chunk := await process.stderr.read(65536):
        log.append(chunk.decode(errors="replace"))
