"""Service processes, started as a user would: `python -m trtmesh.<service>`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import IO

from forks import ForkServer, fork_server, start_module
from process_constants import parted

START_SECONDS = 240.0
STOP_SECONDS = 120.0

PORT_FLAGS = ("--port", "--admin-port", "--http-port", "--metrics-port")


ONE_PROCESS = "cli.one_process"
"""A router with a tokenizer and an engine inside."""

CONVERTERS = (
    "engine.backends.torch.model.pickles",
    "engine.backends.torch.model.adapter_conversion",
)
"""Of weights and of adapters, for commands."""

ON_ONE_HOST = {"TRTMESH_ENGINE_HANDOFF_TRANSPORTS": "shared_memory,grpc"}
"""For engines whose test names no transports: an agent of NIXL takes six times the CPU of the rest of a start."""

BACKENDS = {
    "simulated": ("trtmesh.engine.backends.simulated.backend",),
    # The library itself is found where the environment of a process has it.
    "tensorrt_llm": ("trtmesh.engine.backends.tensorrt_llm.backend",),
    "torch": (
        "trtmesh.engine.backends.torch.backend",
        "trtmesh.engine.backends.torch.engine",
        "trtmesh.engine.backends.torch.loading",
    ),
}
"""Modules that an engine imports once it knows its backend."""

TRACING: tuple[str, ...] = (
    "trtmesh.chassis.tracing.otlp",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
)
"""Modules that a service imports where its environment names a collector; an environment for GPUs may lack them."""
if find_spec("opentelemetry") is None:
    TRACING = ()


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
    _process: subprocess.Popen[bytes]
    _log: list[str]
    _collecting: asyncio.Task[None]

    @property
    def stderr(self) -> str:
        """The log so far; complete after `wait`."""
        return "".join(self._log)

    @property
    def exit_status(self) -> int | None:
        """None while running; negative for a process killed by a signal."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close_stdin(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

    async def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Waits for the process to end; returns its exit status."""
        async with asyncio.timeout(seconds):
            await asyncio.shield(self._collecting)
            return await end_of(self._process)

    async def stop(self) -> int:
        """Sends SIGTERM, as an orchestrator does, and waits for the end."""
        self.signal(signal.SIGTERM)
        return await self.wait()


@asynccontextmanager
async def service_process(
    service: str, *flags: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[ServiceProcess]:
    """Runs `python -m trtmesh.<service> <flags>` on a free port unless `flags` name one; kills it on exit. A `constant`
    among the flags gives the process another value of it.

    The process announces its address before it serves.
    """
    process = await _start(service, flags, env)
    assert process.stdin
    assert process.stdout
    assert process.stderr
    log: list[str] = []
    async with reading(process.stdout) as stdout, reading(process.stderr) as stderr:
        collecting = asyncio.create_task(_collect(stderr, log))
        try:
            with held_ports(flags):
                async with asyncio.timeout(START_SECONDS):
                    line = await stdout.readline()
            if not line:
                await collecting
                raise AssertionError(f"{service} ended before it announced itself:\n{''.join(log)}")
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
            process.kill()
            process.stdin.close()
            await collecting
            await end_of(process)


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
            stdout, stderr = await asyncio.to_thread(process.communicate)
    finally:
        process.kill()
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
) -> subprocess.Popen[bytes]:
    flags, constants = parted(flags)
    server = server_of(service, flags)
    # Only a first process waits long.
    await asyncio.to_thread(server.wait_ready)
    return start_module(
        server,
        f"trtmesh.{service}",
        flags,
        # Concurrent routers must not share the default admin and HTTP ports.
        {
            **os.environ,
            **ON_ONE_HOST,
            "TRTMESH_ROUTER_ADMIN_PORT": "0",
            "TRTMESH_ROUTER_HTTP_PORT": "0",
            **(env or {}),
        },
        constants,
        bufsize=0,
    )


def server_of(service: str, flags: Sequence[str]) -> ForkServer:
    """The server with the imports of a process with these flags, before it serves."""
    return fork_server(imports_of(service, flags))


def imports_of(service: str, flags: Sequence[str]) -> tuple[str, ...]:
    """The modules that a process with these flags, and any environment, imports before it serves."""
    main = f"trtmesh.{service}.__main__"
    backend = dict(pairwise(flags)).get("--backend", "torch")
    # One that is no backend runs nothing.
    runs_torch = service == "engine" and (backend == "torch" or backend not in BACKENDS)
    if runs_torch or service == ONE_PROCESS or service in CONVERTERS:
        # One import of PyTorch for all.
        mains = (f"trtmesh.{each}.__main__" for each in ("router", "engine", "tokenizer"))
        return (*mains, *BACKENDS["torch"], *TRACING)
    return (main, *(BACKENDS[backend] if service == "engine" else ()), *TRACING)


@asynccontextmanager
async def reading(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """Reads a pipe, and closes it at the end."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        yield reader
    finally:
        transport.close()
        # It closes the pipe in the loop's next turn.
        await asyncio.sleep(0)


async def end_of(process: subprocess.Popen[bytes]) -> int:
    while (status := process.poll()) is None:  # noqa: ASYNC110 - a process sets no event
        await asyncio.sleep(0.01)
    return status


async def _collect(stderr: asyncio.StreamReader, log: list[str]) -> None:
    while chunk := await stderr.read(65536):
        log.append(chunk.decode(errors="replace"))
