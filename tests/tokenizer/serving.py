"""A tokenizer in this process on a real socket, and the router's side of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from trtmesh.chassis.channels import channel_options
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.service import Runtime
from trtmesh.tokenizer.router_stream import STREAM_LIMITS, StreamLimits
from trtmesh.tokenizer.service import TokenizerService
from trtmesh.tokenizer.settings import TokenizerSettings
from trtmesh.v1 import tokenizer_pb2 as pb
from trtmesh.v1 import tokenizer_pb2_grpc as pb_grpc

MESSAGE_BYTES = 64 * 2**20


async def until(condition: Callable[[], object]) -> None:
    """Polls until a task or a thread is done, within the test's timeout."""
    while not condition():  # noqa: ASYNC110 - threads and metrics raise no events
        await asyncio.sleep(0.001)


@dataclass
class Server:
    """A served tokenizer."""

    address: str
    service: TokenizerService
    runtime: Runtime
    stub: pb_grpc.TokenizerServiceAsyncStub

    def metric(self, name: str, **labels: str) -> float:
        return self.runtime.registry.get_sample_value(f"trtmesh_tokenizer_{name}", labels) or 0.0

    async def metric_becomes(self, name: str, value: float) -> None:
        await until(lambda: self.metric(name) == value)


@asynccontextmanager
async def served(
    model_dir: Path, limits: StreamLimits = STREAM_LIMITS, **settings: Any
) -> AsyncIterator[Server]:
    runtime = Runtime()
    service = TokenizerService(
        TokenizerSettings.model_validate({"model_dir": model_dir, **settings}), runtime, limits
    )
    server = GrpcServer(MESSAGE_BYTES)
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.start()
    try:
        async with connected(f"127.0.0.1:{port}") as stub:
            yield Server(f"127.0.0.1:{port}", service, runtime, stub)
    finally:
        await service.stop()
        await server.stop(grace=0)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[pb_grpc.TokenizerServiceAsyncStub]:
    options = channel_options(MESSAGE_BYTES)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield pb_grpc.TokenizerServiceStub(channel)


@dataclass
class Link:
    """One stream. Events are kept in the order in which they came."""

    call: Any
    events: list[pb.TokenizerEvent] = field(default_factory=list)
    _unread: list[pb.TokenizerEvent] = field(default_factory=list)

    async def send(self, *commands: pb.TokenizerCommand) -> None:
        await self.call.write(pb.TokenizerServiceConnectRequest(commands=commands))

    async def next(self) -> pb.TokenizerEvent:
        while not self._unread:
            response = await self.call.read()
            assert response is not grpc.aio.EOF, await self.call.details()
            self._unread += response.events
        event = self._unread.pop(0)
        self.events.append(event)
        return event

    async def decode(self, command: pb.TokenizerCommand) -> pb.Decoded:
        """Sends a command and returns the next event as the answer."""
        await self.send(command)
        event = await self.next()
        assert event.WhichOneof("event") == "decoded"
        return event.decoded

    async def encode(self, command: pb.TokenizerCommand) -> pb.Encoded:
        await self.send(command)
        event = await self.next()
        assert event.WhichOneof("event") == "encoded"
        return event.encoded

    async def finish(self) -> None:
        """Half-closes the stream and expects no event and status OK."""
        await self.call.done_writing()
        assert await self.call.read() is grpc.aio.EOF
        assert await self.call.code() == grpc.StatusCode.OK


@asynccontextmanager
async def linked(stub: pb_grpc.TokenizerServiceAsyncStub) -> AsyncIterator[Link]:
    call = stub.Connect()
    try:
        yield Link(call)
    finally:
        call.cancel()


def encode(
    handle: int, text: str | None, words: Iterable[str] = (), *, special: bool = False
) -> pb.TokenizerCommand:
    command = pb.EncodeCommand(handle=handle, text=text, add_special_tokens=special, words=words)
    return pb.TokenizerCommand(encode=command)


def cancel_encode(*handles: int) -> pb.TokenizerCommand:
    return pb.TokenizerCommand(cancel_encode=pb.CancelEncodeCommand(handles=handles))


def open_decode(handle: int, **fields: Any) -> pb.TokenizerCommand:
    return pb.TokenizerCommand(open_decode=pb.OpenDecodeCommand(handle=handle, **fields))


def decode(
    tokens: Mapping[int, Sequence[int]], finished: Iterable[int] = ()
) -> pb.TokenizerCommand:
    command = pb.DecodeCommand(
        handles=tokens,
        token_counts=map(len, tokens.values()),
        token_ids=[token_id for ids in tokens.values() for token_id in ids],
        finished_handles=finished,
    )
    return pb.TokenizerCommand(decode=command)


def close_decode(*handles: int) -> pb.TokenizerCommand:
    return pb.TokenizerCommand(close_decode=pb.CloseDecodeCommand(handles=handles))
