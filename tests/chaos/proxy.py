"""A TCP proxy with the faults of networks: cut, half closed, silent in one or both directions, delayed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Forwards connections to a target until told to fail."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._host, self._port = host, int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._to_target = _Lane()
        self._from_target = _Lane()
        self.connected = asyncio.Event()
        self.address = ""
        self._is_cut = False

    def cut(self) -> None:
        """Aborts every connection, present and future: gRPC retries calls without a sent byte."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self, *, to_target: bool = True, from_target: bool = True) -> None:
        """Forwards nothing in one or both directions; connections stay open."""
        if to_target:
            self._to_target.open.clear()
        if from_target:
            self._from_target.open.clear()

    def half_close(self, *, to_target: bool) -> None:
        """Half-closes every connection: one direction ends, the other stays open."""
        lane = self._to_target if to_target else self._from_target
        lane.half_close()

    def delay(self, seconds: float) -> None:
        """Delays everything from now on."""
        self._to_target.delay = self._from_target.delay = seconds

    def mend(self) -> None:
        """Ends every fault: forwards what was held and accepts connections."""
        self._is_cut = False
        self.delay(0.0)
        for lane in (self._to_target, self._from_target):
            lane.open.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection until it ends."""
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
            await asyncio.gather(
                self._to_target.forward(reader, back), self._from_target.forward(there, writer)
            )
        finally:
            for end in (writer, back):
                end.transport.abort()
                self._writers.discard(end)


class _Lane:
    """One direction of every connection."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        """Writers whose direction is still open."""

    def half_close(self) -> None:
        """Sends end-of-file on every connection; drops later data."""
        while self._writers:
            with suppress(OSError):
                self._writers.pop().write_eof()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._forward(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await reader.read(65536):
                if self.delay:
                    await asyncio.sleep(self.delay)
                await self.open.wait()
                if writer in self._writers:
                    writer.write(chunk)
                    await writer.drain()


@asynccontextmanager
async def proxy_to(target: str) -> AsyncIterator[Proxy]:
    """Runs a proxy of `target` on a free port."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        proxy.mend()
        proxy.cut()
        server.close()
        await server.wait_closed()
