"""The side channel of a simulated library that moves KV itself: each process serves the KV that it keeps to others of
its host, and pulls what a state names.

A pull is a line with the lease, answered by a line with the content of the KV; no bytes of KV move.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trtmesh.engine.backend import Content
from trtmesh.engine.backends.simulated.states import PULL_BYTES, RemoteState, UnusableState

log = logging.getLogger(__name__)

HOST = "127.0.0.1"

PULL_SECONDS = 60.0
"""Time for another process to answer."""

Pull = Callable[[str], Content | None]


class SideChannel:
    """The server and the pulls of a process."""

    def __init__(self, pull: Pull) -> None:
        """`pull` gives KV of this process away."""
        self._pull = pull
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Serves, and returns the port."""
        self._server = await asyncio.start_server(self._serve, HOST, 0, limit=PULL_BYTES)
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
        self, state: RemoteState, seconds: float, then: Callable[[Content | UnusableState], None]
    ) -> None:
        """Pulls the KV that a state names, which takes `seconds`; calls `then` with its content or the failure."""
        task = asyncio.get_running_loop().create_task(self._fetch(state, seconds, then))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _fetch(
        self, state: RemoteState, seconds: float, then: Callable[[Content | UnusableState], None]
    ) -> None:
        found: Content | UnusableState
        try:
            async with asyncio.timeout(PULL_SECONDS + seconds):
                await asyncio.sleep(seconds)
                found = await _ask(state)
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = UnusableState(f"names KV that cannot be pulled: {type(error).__name__}")
        except UnusableState as error:
            found = error
        then(found)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(PULL_SECONDS):
                content = self._pull((await reader.readline()).decode().strip())
                answer = (
                    {"tokens": content.tokens, "digest": content.digest.hex()} if content else {}
                )
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError) as error:
            log.info("a pull of KV failed: %s", type(error).__name__)
        finally:
            writer.close()


async def _ask(state: RemoteState) -> Content:
    """Asks the process that keeps the KV. Raises UnusableState, OSError, ValueError, KeyError or TypeError."""
    reader, writer = await asyncio.open_connection(HOST, state.port, limit=PULL_BYTES)
    try:
        writer.write(state.lease_id.encode() + b"\n")
        answer: dict[str, Any] = json.loads(await reader.readline() or b"{}")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    if not answer:
        raise UnusableState("names KV that is not kept any more")
    return Content(int(answer["tokens"]), bytes.fromhex(answer["digest"]))
