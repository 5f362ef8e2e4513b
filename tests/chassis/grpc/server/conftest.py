"""A server on a real socket, with a method of every kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest_asyncio
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.rpc import Refusal

MOST_BYTES = 8 * 2**20

GUEST = {"guest": "yes"}
"""Metadata of calls that the guard refuses."""


def _no_guests(call: grpc.HandlerCallDetails) -> Refusal | None:
    if GUEST.items() & (call.invocation_metadata or ()):
        return Refusal(grpc.StatusCode.UNAUTHENTICATED, "no guests", (("why", "a guest"),))
    return None


@dataclass
class Example:
    """The handlers and their observations."""

    address: str = ""
    server: Any = field(default_factory=lambda: GrpcServer(MOST_BYTES, _no_guests))
    contexts: list[Any] = field(default_factory=list)
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    tidied: asyncio.Event = field(default_factory=asyncio.Event)
    late: asyncio.Event = field(default_factory=asyncio.Event)
    writing: asyncio.Task[None] | None = None
    written: int = 0

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    def hold_unread(self, size: int) -> None:
        """Limits the system's buffers for later connections and turns off TCP_USER_TIMEOUT: the server, not the system,
        must abort a client that does not read."""
        for server in self.server._servers:
            for listener in server.sockets:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
                if hasattr(socket, "TCP_USER_TIMEOUT"):
                    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)

    async def echo(self, request: bytes, context: Any) -> bytes:
        self.contexts.append(context)
        return request

    async def fail(self, request: bytes, context: Any) -> bytes:
        if request == b"status":
            context.set_code(grpc.StatusCode.UNIMPLEMENTED)
            context.set_details("not yet")
        if request in (b"defect", b"status"):
            raise ZeroDivisionError("by zero")
        if request == b"kept":
            error = InvalidRequest("of which this frame knows, as the error knows the frame")
            raise error
        trailing = (("reason", "OWN"), ("data-bin", b"\x00\xff"))
        context.set_trailing_metadata(trailing)
        await context.abort(grpc.StatusCode.DATA_LOSS, request.decode())
        raise AssertionError("abort raises")

    async def refuse(self, request: bytes, context: Any) -> None:
        """Blames the client."""
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such request")

    async def wait(self, request: bytes, context: Any) -> bytes:
        self.waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b""

    async def tidy(self, request: bytes, context: Any) -> bytes:
        """Takes long to clean up."""
        self.waiting.set()
        try:
            return await self.wait(request, context)
        finally:
            await self.may_end.wait()
            self.tidied.set()

    async def write_late(self, request: bytes, context: Any) -> None:
        """Ends while a task writes after a cancelled write."""
        cut_off = asyncio.create_task(context.write(bytes(100)))
        await asyncio.sleep(0)
        cut_off.cancel()

        async def write() -> None:
            try:
                await context.write(b"late")
            except asyncio.CancelledError:
                self.late.set()

        self.writing = asyncio.create_task(write())
        await asyncio.sleep(0)

    async def misspell(self, request: bytes, context: Any) -> None:
        """Sends invalid metadata."""
        context.set_trailing_metadata((("reason", None),))
        await context.abort(grpc.StatusCode.DATA_LOSS, "lost")

    async def many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """`count,size`: so many messages of so many bytes."""
        try:
            count, size = map(int, request.split(b","))
        except ValueError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not `count,size`")
        for number in range(count):
            yield bytes((number % 251,)) * size
            self.written += 1

    async def write(self, request: bytes, context: Any) -> None:
        """The same, by writing."""
        async for message in self.many(request, context):
            await context.write(message)

    async def whole(self, request: bytes, context: Any) -> bytes:
        """`size`: so many bytes, in a single message."""
        return bytes(int(request))

    async def cut_off(self, request: bytes, context: Any) -> None:
        """Ends while the rest of its message is unread."""
        writing = asyncio.create_task(context.write(bytes(int(request))))
        await asyncio.sleep(0)
        writing.cancel()

    async def join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([each async for each in requests])

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request[::-1]

    async def first(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Ends before the client."""
        return bytes(await context.read())

    async def ignore(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        """Reads nothing."""
        return await self.wait(b"", context)


@asynccontextmanager
async def serving(example: Example) -> AsyncIterator[Example]:
    """Starts an example and stops it in the end."""
    one, stream = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
    handlers: dict[str, Any] = {
        "Echo": one(example.echo),
        "Fail": one(example.fail),
        "Refuse": one(example.refuse),
        "Wait": one(example.wait),
        "Tidy": one(example.tidy),
        "WriteLate": grpc.unary_stream_rpc_method_handler(example.write_late),
        "Misspell": one(example.misspell),
        "Many": grpc.unary_stream_rpc_method_handler(example.many),
        "Write": grpc.unary_stream_rpc_method_handler(example.write),
        "Whole": one(example.whole),
        "CutOff": grpc.unary_stream_rpc_method_handler(example.cut_off),
        "Join": stream(example.join),
        "First": stream(example.first),
        "Ignore": stream(example.ignore),
        "Chat": grpc.stream_stream_rpc_method_handler(example.chat),
    }
    example.server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Service", handlers),)
    )
    example.server.add_registered_method_handlers("example.Service", handlers)
    example.address = f"127.0.0.1:{example.server.add_insecure_port('127.0.0.1:0')}"
    await example.server.start()
    try:
        yield example
    finally:
        await example.server.stop(grace=None)


@pytest_asyncio.fixture
async def example() -> AsyncIterator[Example]:
    async with serving(Example()) as example:
        yield example
