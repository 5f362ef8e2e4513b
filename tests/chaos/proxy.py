"""A TCP connection that can be cut, as by a network that fails or a client that loses power."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Forwards connections to a target until it is cut."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._host, self._port = host, int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self.connected = asyncio.Event()
        self.address = ""
        self._is_cut = False

    def cut(self) -> None:
        """Breaks every connection at once, without a farewell, and every one that is tried later: gRPC sends a call
        again that never reached the old one."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its beginning to its end."""
        try:
            there, back = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        self.connected.set()
        if self._is_cut:
            self.cut()
        try:
            await asyncio.gather(_forward(reader, back), _forward(there, writer))
        finally:
            for end in (writer, back):
                end.transport.abort()
                self._writers.discard(end)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def proxy_to(target: str) -> AsyncIterator[Proxy]:
    """A proxy of `target` on a port of its own."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        proxy.cut()
        server.close()
        await server.wait_closed()
