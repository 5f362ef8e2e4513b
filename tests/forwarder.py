"""Forwards connections to a server, at most so many bytes of each, and counts the bytes of its answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress


class Forwarder:
    """What a server's clients see of it."""

    def __init__(self, target: str, most_bytes: float) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._most_bytes = most_bytes
        self._over = asyncio.Event()
        self.address = ""
        self.is_held = asyncio.Event()
        """A connection has sent as many bytes as it may, and no more of it is read."""
        self.answered_bytes = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with AsyncExitStack() as stack:
            stack.callback(writer.close)
            near, far = await asyncio.open_connection(self._host, self._port)
            stack.callback(far.close)
            await asyncio.gather(
                self._copy(reader, far, most=self._most_bytes),
                self._copy(near, writer, counts=True),
            )

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        most: float = math.inf,
        counts: bool = False,
    ) -> None:
        left = most
        with suppress(ConnectionError):
            while data := await reader.read(int(min(left, 2**16))):
                left -= len(data)
                self.answered_bytes += len(data) * counts
                writer.write(data)
                await writer.drain()
        if not left:
            self.is_held.set()
            await self._over.wait()
        writer.close()

    def let_go(self) -> None:
        """Ends the connections that are held."""
        self._over.set()


@asynccontextmanager
async def forwarded(target: str, most_bytes: float = math.inf) -> AsyncIterator[Forwarder]:
    """Forwards from a free port, at most so many bytes of each connection."""
    forwarder = Forwarder(target, most_bytes)
    server = await asyncio.start_server(forwarder.forward, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        forwarder.address = f"{host}:{port}"
        try:
            yield forwarder
        finally:
            forwarder.let_go()
