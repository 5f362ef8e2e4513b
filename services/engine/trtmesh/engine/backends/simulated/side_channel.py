"""The side channel of a simulated library that moves KV itself: each process serves the KV that it keeps to others of
its host, and pulls what a state names.

A pull is a line with the lease, answered by a line that says whether it is kept; no bytes of KV move.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from trtmesh.chassis.errors import HandoffFailed
from trtmesh.engine.backends.simulated.states import RemoteState

log = logging.getLogger(__name__)

HOST = "127.0.0.1"

PULL_SECONDS = 60.0
"""Time for another process to answer."""

LINE_BYTES = 256
"""Most bytes of a line between two processes."""

KEPT = b"kept\n"


class SideChannel:
    """The server and the pulls of a process."""

    def __init__(self, pull: Callable[[str], bool]) -> None:
        """`pull` gives KV of this process away, and says whether it was kept."""
        self._pull = pull
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Serves, and returns the port."""
        self._server = await asyncio.start_server(self._serve, HOST, 0, limit=LINE_BYTES)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Ends the server and all pulls."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server:
            self._server.close()

    def fetch(
        self, state: RemoteState, seconds: float, then: Callable[[HandoffFailed | None], None]
    ) -> None:
        """Pulls the KV that a state names, which takes `seconds`; calls `then` with the failure, if any."""
        task = asyncio.get_running_loop().create_task(self._fetch(state, seconds, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(
        self, state: RemoteState, seconds: float, then: Callable[[HandoffFailed | None], None]
    ) -> None:
        problem = ""
        try:
            async with asyncio.timeout(PULL_SECONDS + seconds):
                await asyncio.sleep(seconds)
                if not await _is_kept(state):
                    problem = "is not kept any more"
        except (OSError, ValueError) as error:
            problem = f"cannot be pulled: {type(error).__name__}"
        then(HandoffFailed(f"the KV that the handoff state names {problem}") if problem else None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PULL_SECONDS):
                is_kept = self._pull((await reader.readline()).decode().strip())
                writer.write(KEPT if is_kept else b"\n")
                await writer.drain()
        except (OSError, ValueError) as error:
            log.info("a pull of KV failed: %s", type(error).__name__)
        finally:
            writer.close()


async def _is_kept(state: RemoteState) -> bool:
    """Asks the process that keeps the KV. Raises OSError or ValueError."""
    reader, writer = await asyncio.open_connection(HOST, state.port, limit=LINE_BYTES)
    try:
        writer.write(state.lease_id.encode() + b"\n")
        return await reader.readline() == KEPT
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
