"""A TCP proxy with the faults of networks: cut, half closed, silent in one or both directions, delayed, damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from chaos.frames import frames_of, is_data, with_flipped_byte

Split = Callable[[asyncio.StreamReader], AsyncIterator[bytes]]
"""What is forwarded at once."""


DialerOf = Callable[[int, int], Awaitable[str]]
"""Names the dialer of a connection by its port there and the port it dialed; '' has no link of its own."""


async def chunks_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The bytes of a connection as they come."""
    while chunk := await reader.read(65536):
        yield chunk


class Link:
    """Connections that fail together."""

    def __init__(self, split: Split) -> None:
        self._writers: set[asyncio.StreamWriter] = set()
        self.to_target = Lane(split)
        self.from_target = Lane(split)
        self.connected = asyncio.Event()
        self._is_cut = False

    def cut(self) -> None:
        """Aborts every connection, present and future: gRPC retries calls without a sent byte."""
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def freeze(self, *, to_target: bool = True, from_target: bool = True) -> None:
        """Forwards nothing in one or both directions; connections stay open."""
        if to_target:
            self.to_target.open.clear()
        if from_target:
            self.from_target.open.clear()

    def half_close(self, *, to_target: bool) -> None:
        """Half-closes every connection: one direction ends, the other stays open."""
        lane = self.to_target if to_target else self.from_target
        lane.half_close()

    def delay(self, seconds: float) -> None:
        """Delays everything from now on."""
        self.to_target.delay = self.from_target.delay = seconds

    def mend(self) -> None:
        """Ends every fault: forwards what was held and accepts connections."""
        self._is_cut = False
        self.connected.clear()
        for lane in (self.to_target, self.from_target):
            lane.mend()

    async def forward(
        self,
        near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> None:
        """Forwards one connection until it ends."""
        writers = {near[1], far[1]}
        self._writers |= writers
        self.connected.set()
        if self._is_cut:
            self.cut()
        try:
            await asyncio.gather(
                self.to_target.forward(near[0], far[1]), self.from_target.forward(far[0], near[1])
            )
        finally:
            self._writers -= writers


class Lane:
    """One direction of the connections of a link."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self.open = asyncio.Event()
        self.delay = 0.0
        self.has_damaged = asyncio.Event()
        self.is_holding = asyncio.Event()
        """Whether something waits for `release`."""
        self._damages = False
        self._data_left: int | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        """Writers whose direction is still open."""
        self.open.set()

    def hold_data(self, after: int) -> None:
        """Holds everything after this many HTTP/2 frames with data."""
        self._data_left = after

    def damage_data(self) -> None:
        """Flips a byte of the next long HTTP/2 frame with data."""
        self._damages = True

    def half_close(self) -> None:
        """Sends end-of-file on every connection; drops later data."""
        while self._writers:
            with suppress(OSError):
                self._writers.pop().write_eof()

    def release(self) -> None:
        """Forwards what was held."""
        self._data_left = None
        self.is_holding.clear()
        self.open.set()

    def mend(self) -> None:
        """Ends every fault."""
        self.delay, self._damages = 0.0, False
        self.has_damaged.clear()
        self.release()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self._forward(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            async for chunk in self._split(reader):
                if self.delay:
                    await asyncio.sleep(self.delay)
                self._count(chunk)
                if not self.open.is_set():
                    self.is_holding.set()
                    await self.open.wait()
                if writer in self._writers:
                    writer.write(self._damaged(chunk))
                    await writer.drain()

    def _count(self, chunk: bytes) -> None:
        if self._data_left is not None and is_data(chunk):
            if not self._data_left:
                self.open.clear()
            else:
                self._data_left -= 1

    def _damaged(self, chunk: bytes) -> bytes:
        if not self._damages or (flipped := with_flipped_byte(chunk)) is None:
            return chunk
        self._damages = False
        self.has_damaged.set()
        return flipped


class Proxy(Link):
    """Forwards connections to a target until told to fail. The gRPC connections of each named dialer are a link."""

    def __init__(self, target: str, dialer_of: DialerOf) -> None:
        super().__init__(chunks_of)
        host, _, port = target.rpartition(":")
        self._host, self._port = host, int(port)
        self._dialer_of = dialer_of
        self._links: dict[str, Link] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self.address = ""

    def link(self, dialer: str) -> Link:
        """The gRPC connections of a dialer."""
        return self._links.setdefault(dialer, Link(frames_of))

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Begins to forward a connection."""
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        # A task that is cancelled before its first step runs no `finally`.
        serving.add_done_callback(lambda _: writer.transport.abort())

    async def close(self) -> None:
        """Aborts every connection."""
        serving = [*self._serving]
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far = await asyncio.open_connection(self._host, self._port)
        except OSError:
            return
        try:
            ports = (writer.get_extra_info(name)[1] for name in ("peername", "sockname"))
            dialer = await self._dialer_of(*ports)
            link = self.link(dialer) if dialer else self
            await link.forward((reader, writer), far)
        finally:
            far[1].transport.abort()


async def nobody(_: int, __: int) -> str:
    """Names no dialer."""
    return ""


@asynccontextmanager
async def proxy_to(target: str, dialer_of: DialerOf = nobody) -> AsyncIterator[Proxy]:
    """Runs a proxy of `target` on a free port; `dialer_of` names dialers."""
    proxy = Proxy(target, dialer_of)
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.address = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        # What is accepted by now is told to the proxy.
        await asyncio.sleep(0)
        await proxy.close()
        # Since Python 3.12 it waits for the connections too.
        await server.wait_closed()
