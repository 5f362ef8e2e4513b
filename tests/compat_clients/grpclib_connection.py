"""grpclib, which frames HTTP/2 by h2 in pure Python."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from compat_clients.connection import Answer, Options, Refused, Stream
from grpclib.client import Channel, StreamStreamMethod, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.exceptions import GRPCError

VERSION = f"grpclib {version('grpclib')}"


@asynccontextmanager
async def connected(options: Options) -> AsyncIterator[GrpclibConnection]:
    host, port = options.host_and_port
    assert not options.gzip, "grpclib does not compress"
    tls = None
    if options.ca:
        tls = ssl.create_default_context(cafile=options.ca)
        tls.set_alpn_protocols(["h2"])
    seconds = options.keepalive_seconds
    config = Configuration()
    if seconds:
        config = Configuration(
            _keepalive_time=seconds, _keepalive_permit_without_calls=True,
            _http2_max_pings_without_data=0, _http2_min_sent_ping_interval_without_data=seconds,
        )  # fmt: skip
    channel = Channel(host, port, ssl=tls, config=config)
    try:
        yield GrpclibConnection(channel)
    finally:
        channel.close()


class GrpclibConnection:
    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def unary(self, path: str, request: Any, answer: type[Answer]) -> Any:
        method: Any = UnaryUnaryMethod(self._channel, path, type(request), answer)
        try:
            return await method(request)
        except GRPCError as error:
            raise _refused(error) from error

    @asynccontextmanager
    async def stream(
        self, path: str, request: Any, answer: type[Answer], seconds: float | None = None
    ) -> AsyncIterator[Stream]:
        method: Any = UnaryStreamMethod(self._channel, path, type(request), answer)
        async with _translated(), method.open(timeout=seconds) as opened:
            await opened.send_message(request, end=True)
            yield GrpclibStream(opened)

    @asynccontextmanager
    async def duplex(self, path: str, answer: type[Answer]) -> AsyncIterator[Stream]:
        method: Any = StreamStreamMethod(self._channel, path, object, answer)
        async with _translated(), method.open() as opened:
            yield GrpclibStream(opened)


class GrpclibStream(Stream):
    def __init__(self, opened: Any) -> None:
        self._opened = opened

    async def send(self, request: Any) -> None:
        await self._opened.send_message(request)

    async def end(self) -> None:
        await self._opened.end()

    async def answers(self) -> AsyncGenerator[Any, None]:
        async with _translated():
            while (answer := await self._opened.recv_message()) is not None:
                yield answer
            await self._opened.recv_trailing_metadata()

    async def cancel(self) -> None:
        await self._opened.cancel()


@asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except GRPCError as error:
        raise _refused(error) from error
    except TimeoutError as error:
        raise Refused("DEADLINE_EXCEEDED", "by the client") from error


def _refused(error: Any) -> Refused:
    return Refused(error.status.name, error.message or "")
