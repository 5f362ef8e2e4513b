"""A process of the stack, from start to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trtmesh.chassis.bearer import AdminToken, ApiKey
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.errors import STARTUP_ERROR_PREFIX, StartupError
from trtmesh.chassis.tasks import until_first_ends
from trtmesh.cli.plan import LOOPBACK, ProcessPlan
from trtmesh.cli.starting import SERVES, Tell

_WILDCARDS = ("0.0.0.0", "[::]", "::")
UNAVAILABLE, CANCELLED = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED
_WHOLE_PROCESS = health_pb2.HealthCheckRequest()

Log = Callable[[str, str], None]
"""Takes the name of a process and a line of its output."""


class ChildEnded(StartupError):
    """A required process of the stack ended; the command ends with the same status."""

    def __init__(self, plan: ProcessPlan, status: int, last_lines: Sequence[str]) -> None:
        super().__init__(f"{plan.name}{_cause(plan.service, status, last_lines)}")
        self.exit_status = status if status > 0 else 1


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of a process; '' and None for ports that are off."""

    address: str = ""
    admin_address: str = ""
    http_address: str = ""
    metrics_port: int | None = None

    def for_this_machine(self) -> Addresses:
        """The addresses with the loopback in place of a wildcard."""
        own = (_local(self.address), _local(self.admin_address), _local(self.http_address))
        return Addresses(*own, self.metrics_port)


class Child:
    """Starts, watches and stops a process. `start` may be called again after its end."""

    def __init__(
        self, plan: ProcessPlan, log: Log, tell: Tell = lambda _name, _doing: None
    ) -> None:
        """`tell` gets the progress of the start."""
        self.plan = plan
        self._tell = tell
        self.ports = dict(plan.ports)
        self.bound = Addresses()
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=3)
        self._process: Process | None = None
        self._started = asyncio.Event()
        self._served = False
        self._relays: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def local(self) -> Addresses:
        return self.bound.for_this_machine()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def served(self) -> bool:
        """Whether the process has served since its last start."""
        return self._served

    async def start(self) -> None:
        """Returns when the process listens. A restart takes the same ports."""
        self._last_lines.clear()
        self._served = False
        # A new session: Ctrl-C reaches the supervisor alone, for an orderly stop. The pipe on standard input closes
        # with the supervisor, even after SIGKILL, and then the process ends.
        process = self._process = await asyncio.create_subprocess_exec(
            *self.plan.command(self.ports),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
            env={**_inherited(self.plan.service), **self.plan.environment},
        )
        self._started.set()
        self._tell(self.name, "starts")
        assert process.stdout
        assert process.stderr
        lines = _lines(process.stdout)
        self._relays = [asyncio.create_task(self._relay(_lines(process.stderr)))]
        announced = await self._announcement(lines)
        self._relays.append(asyncio.create_task(self._relay_progress(lines)))
        names = [each.name for each in fields(Addresses)]
        self.bound = Addresses(**{name: announced[name] for name in names if name in announced})
        got = {
            "port": _port(self.bound.address),
            "admin_port": _port(self.bound.admin_address),
            "http_port": _port(self.bound.http_address),
            "metrics_port": self.bound.metrics_port,
        }
        self.ports |= {name: port for name, port in got.items() if port and name in self.ports}

    async def wait_serving(self) -> None:
        """Returns when the process reports SERVING. Raises ChildEnded if the process ends first."""
        await while_alive((self,), self._watch_health())
        self._served = True
        self._tell(self.name, SERVES)

    async def raise_at_end(self) -> NoReturn:
        """Waits for the start of the process, then for the end."""
        await self._started.wait()
        raise await self._end()

    async def wait(self) -> int:
        """Returns the exit status, or the negative signal number of a killed process."""
        assert self._process
        status = await self._process.wait()
        if self._relays:
            # A grandchild may hold the pipes open; do not wait for more output.
            await asyncio.wait(self._relays, timeout=1)
        return status

    def finish(self) -> None:
        """Asks a serving process to finish. A process still loading has no work to finish, and is killed."""
        self._signal(signal.SIGTERM if self._served else signal.SIGKILL)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def _announcement(self, lines: AsyncIterator[str]) -> dict[str, Any]:
        """Returns the addresses that the process announces in a line of JSON."""
        async for line in lines:
            try:
                return dict(json.loads(line))
            except ValueError:
                self._log(self.name, line)
        raise await self._end()

    async def _end(self) -> ChildEnded:
        status = await self.wait()
        return ChildEnded(self.plan, status, self._last_lines)

    async def _watch_health(self) -> None:
        async with open_channel(self.local.address, 2**20, tls=self.plan.tls) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    async for answer in stub.Watch(_WHOLE_PROCESS, wait_for_ready=True):
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.aio.AioRpcError as error:
                    # A process about to end cancels its calls or closes the connection. The next turn waits for a new
                    # connection; `raise_at_end` reports the end.
                    if error.code() not in (UNAVAILABLE, CANCELLED):
                        raise

    async def _relay_progress(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            try:
                self._tell(self.name, str(json.loads(line)["progress"]))
            except (ValueError, TypeError, KeyError):
                self._log(self.name, line)

    async def _relay(self, lines: AsyncIterator[str]) -> None:
        async for line in lines:
            self._last_lines.append(line)
            self._log(self.name, line)


def _inherited(service: str) -> dict[str, str]:
    """Returns the variables for a process: no client's key, and the admin token only for a router."""
    secrets = {ApiKey.variable} | ({AdminToken.variable} if service != "router" else set())
    return {name: value for name, value in os.environ.items() if name not in secrets}


def _cause(service: str, status: int, last_lines: Sequence[str]) -> str:
    """Returns the error that ended a service, or the last lines of the log."""
    prefix = STARTUP_ERROR_PREFIX.format(section=service)
    for line in reversed(last_lines):
        if line.startswith(prefix):
            return f": {line.removeprefix(prefix)}"
    return f" ended with status {status}: {' / '.join(last_lines) or 'without output'}"


def _local(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{LOOPBACK}:{port}" if host in _WILDCARDS else address


def _port(address: str) -> int | None:
    return int(address.rpartition(":")[2]) if address else None


async def while_alive(children: Iterable[Child], work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`. Raises ChildEnded if one of `children` ends first."""
    await until_first_ends(work, *(child.raise_at_end() for child in children))


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields lines of any length."""
    rest = b""
    while chunk := await stream.read(65536):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")
