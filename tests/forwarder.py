"""Forwards connections to a server and counts the bytes of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Forwarder:
    """What a server's clients see of it."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self.address = ""
        self.answered_bytes = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_connection(self._host, self._port)
        try:
            await asyncio.gather(self._copy(reader, far), self._copy(near, writer, counts=True))
        finally:
            far.close()
            writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                self.answered_bytes += len(data) * counts
                writer.write(data)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def forwarded(target: str) -> AsyncIterator[Forwarder]:
    """Forwards from a free port."""
    forwarder = Forwarder(target)
    server = await asyncio.start_server(forwarder.forward, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        forwarder.address = f"{host}:{port}"
        yield forwarder
