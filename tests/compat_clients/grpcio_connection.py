"""grpcio, by its asynchronous API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from compat_clients.connection import MAX_MESSAGE_BYTES, Answer, Options, Refused, Stream

VERSION = f"grpcio {grpc.__version__}"


@asynccontextmanager
async def connected(options: Options) -> AsyncIterator[GrpcioConnection]:
    given: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    if options.keepalive_seconds:
        given += [
            ("grpc.keepalive_time_ms", int(options.keepalive_seconds * 1000)),
            ("grpc.keepalive_timeout_ms", 5000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ]
    more: dict[str, Any] = {"options": given}
    if options.gzip:
        more["compression"] = grpc.Compression.Gzip
    if options.ca:
        credentials = grpc.ssl_channel_credentials(options.authorities)
        channel = grpc.aio.secure_channel(options.address, credentials, **more)
    else:
        channel = grpc.aio.insecure_channel(options.address, **more)
    async with channel:
        yield GrpcioConnection(channel)


class GrpcioConnection:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def unary(self, path: str, request: Any, answer: type[Answer]) -> Any:
        call: Any = self._channel.unary_unary(path, _bytes, answer.FromString)
        try:
            return await call(request)
        except grpc.aio.AioRpcError as error:
            raise _refused(error) from error

    @asynccontextmanager
    async def stream(
        self, path: str, request: Any, answer: type[Answer], seconds: float | None = None
    ) -> AsyncIterator[Stream]:
        opened: Any = self._channel.unary_stream(path, _bytes, answer.FromString)
        stream = GrpcioStream(opened(request, timeout=seconds))
        try:
            yield stream
        finally:
            await stream.cancel()

    @asynccontextmanager
    async def duplex(self, path: str, answer: type[Answer]) -> AsyncIterator[Stream]:
        opened: Any = self._channel.stream_stream(path, _bytes, answer.FromString)
        stream = GrpcioStream(opened())
        try:
            yield stream
        finally:
            await stream.cancel()


class GrpcioStream(Stream):
    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, request: Any) -> None:
        await self._call.write(request)

    async def end(self) -> None:
        await self._call.done_writing()

    async def answers(self) -> AsyncGenerator[Any, None]:
        try:
            while (answer := await self._call.read()) is not grpc.aio.EOF:
                yield answer
        except grpc.aio.AioRpcError as error:
            raise _refused(error) from error
        code = await self._call.code()
        if code is not grpc.StatusCode.OK:
            raise Refused(code.name, await self._call.details())

    async def cancel(self) -> None:
        self._call.cancel()


def _bytes(request: Any) -> bytes:
    data: bytes = request.SerializeToString()
    return data


def _refused(error: grpc.aio.AioRpcError) -> Refused:
    return Refused(error.code().name, error.details() or "")
