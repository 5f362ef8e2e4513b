"""The bridge of a foreign engine: a separate process that speaks our protocol to this router.

The router never speaks an engine's contract. The router starts `python -m trtmesh.engine --backend foreign`, connects
as to any worker, and starts the process again after an end. The pipe on the standard input closes with the router, for
any reason, and the process ends with the pipe.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from trtmesh.chassis.addresses import Address, AddressCheck, ForeignAddress
from trtmesh.chassis.channels import open_channel
from trtmesh.chassis.errors import STARTUP_ERROR_PREFIX, TrtmeshError, Unavailable
from trtmesh.chassis.settings import CommaList, Settings
from trtmesh.chassis.tasks import until_first_ends

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 10.0
"""Pause before the second start. Doubles with each failure up to the limit; a bridge that served resets the pause."""

END_SECONDS = 2.0
"""Time for a bridge to end its sequences."""

KEPT = "TRTMESH_ENGINE_FOREIGN_"
"""Prefix of the variables that bridges inherit among those of this software."""

LONGEST_LINE = 2**20
"""Most bytes of a line of its log."""

MESSAGE_BYTES = 2**16
"""Largest message of the health service."""


class ForeignWorkerSettings(Settings):
    """Engines with a contract of their own, each behind a bridge process started by the router."""

    model_dirs: CommaList = ()
    """Directories of models served by foreign engines. A worker whose model has the name of a directory is taken to
    have these weights, and exchanges sequences with engines of ours with the same weights."""


class Bridge:
    """Keeps a bridge running for one foreign engine."""

    def __init__(
        self, address: ForeignAddress, settings: ForeignWorkerSettings, max_message_bytes: int
    ) -> None:
        self._engine = address
        self._settings = settings
        self._max_message_bytes = max_message_bytes
        self._serves_at = ""
        self._problem = "its bridge starts"
        self._last_lines: deque[str] = deque(maxlen=3)

    def address(self) -> str:
        """Returns the address of the bridge. Raises Unavailable with the reason if the bridge does not serve."""
        if not self._serves_at:
            raise Unavailable(self._problem)
        return self._serves_at

    async def run(self, check: Callable[[], AddressCheck | None]) -> None:
        """Starts the bridge again and again until cancelled; `check` gives the check of the engine's IP address."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            served = False
            try:
                served = await self._live(await _resolved(self._engine.address, check()))
            except (OSError, UnicodeError, TrtmeshError) as error:
                self._problem = str(error)
            except Exception as error:
                # Broad on purpose: after a defect the router must still start the next bridge.
                log.exception("the bridge of %s failed", self._engine)
                self._problem = f"its bridge failed: {type(error).__name__}: {error}"
            pause = FIRST_PAUSE_SECONDS if served else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    async def _live(self, engine: Address) -> bool:
        """Runs a process to the end. Returns whether the process served. Ends the process in any case."""
        process = await asyncio.create_subprocess_exec(
            *self._command(engine),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,
            env=_environment(os.environ),
        )
        self._last_lines.clear()
        try:
            await until_first_ends(self._serve(process), self._relay(process))
            served = bool(self._serves_at)
            self._problem = _cause(await process.wait(), self._last_lines)
        finally:
            self._serves_at = ""
            await _end(process)
        return served

    async def _serve(self, process: Process) -> None:
        """Gives the address away once the bridge serves. Never returns: `_relay` ends with the process."""
        assert process.stdout
        if line := await process.stdout.readline():
            address = str(json.loads(line)["address"])
            await _serving(address)
            self._serves_at, self._problem = address, ""
        await asyncio.Event().wait()

    async def _relay(self, process: Process) -> None:
        """Logs what the bridge says, to the end."""
        assert process.stderr
        while line := await process.stderr.readline():
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            log.warning("%s: %s", self._engine, text)

    def _command(self, engine: Address) -> list[str]:
        flags = {
            "backend": "foreign",
            "foreign-address": str(self._engine._replace(address=engine)),
            "foreign-model-dirs": ",".join(self._settings.model_dirs),
            "worker": str(self._engine),
            "host": "127.0.0.1",
            "port": "0",
            "metrics-port": "none",
            "grace-seconds": "0",
            "max-message-bytes": str(self._max_message_bytes),
            "log-level": "warning",
            "log-format": "text",
            "stop-on-stdin-eof": "true",
        }
        given = [part for name, value in flags.items() for part in (f"--{name}", value)]
        return [sys.executable, "-m", "trtmesh.engine", *given]


async def _resolved(address: Address, check: AddressCheck | None) -> Address:
    """Returns the IP address for the bridge to dial, already checked: a name could mean another address later. Raises
    OSError, or the error of the check."""
    found = await asyncio.get_running_loop().getaddrinfo(*address, type=socket.SOCK_STREAM)
    *_, place = min(found)
    chosen = Address(str(place[0]), address.port)
    if check is not None:
        check(address, chosen.host)
    return chosen


async def _serving(address: str) -> None:
    """Returns when the bridge reports SERVING, however long that takes."""
    async with open_channel(address, MESSAGE_BYTES) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with suppress(grpc.aio.AioRpcError):
                request = health_pb2.HealthCheckRequest()
                async for answer in stub.Watch(request, wait_for_ready=True):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            await asyncio.sleep(FIRST_PAUSE_SECONDS)


async def _end(process: Process) -> None:
    """Ends the process, also where the caller is being cancelled."""
    if process.stdin:
        process.stdin.close()
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """The router's variables without settings of other services, its configuration file, and secrets."""
    return {
        name: value
        for name, value in own.items()
        if name.startswith(KEPT) or not name.startswith("TRTMESH_")
    }


def _cause(status: int, last_lines: deque[str]) -> str:
    """Why a bridge ended, in its own words."""
    prefix = STARTUP_ERROR_PREFIX.format(section="engine")
    for line in reversed(last_lines):
        if line.startswith(prefix):
            return line.removeprefix(prefix)
    last = last_lines[-1].strip() if last_lines else "without output"
    return f"its bridge ended with status {status}: {last}"
