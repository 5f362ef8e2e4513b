"""Calls between services of one process: gRPC's handlers, messages and statuses without a connection.

Messages are passed on without copying or serializing, so a sender must not change a message afterwards. Flow control
counts messages: a sender waits while UNREAD_MESSAGES are unread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Generic, NoReturn, TypeVar

import grpc
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.forwarding import Receive, Rest
from trtmesh.chassis.grpc.client.call import (
    Call,
    CallEnded,
    Connection,
    Method,
    Request,
    Response,
    as_error,
)
from trtmesh.chassis.grpc.client.headers import Status
from trtmesh.chassis.grpc.server.call import Handler, function_of
from trtmesh.chassis.grpc.server.server import GrpcServer
from trtmesh.chassis.panics import is_failure
from trtmesh.chassis.rpc import Refusal

UNREAD_MESSAGES = 2
"""Unread messages of a call each way. More would only wait: senders merge their output meanwhile."""

PEER = "in-memory:"
"""The peer of every call."""

Message = TypeVar("Message")


class Pipe(Generic[Message]):
    """Messages from a sender to a reader, in order."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._change: asyncio.Future[Rest | None] | None = None
        """For the waiting end. Sender and reader never wait together."""
        self._receive: Receive[Message] | None = None
        """Takes messages at once."""

    def put_now(self, message: Message) -> bool:
        """Passes the message on or queues it, and returns whether: not without room, nor into a closed pipe."""
        if self._closed or len(self._messages) >= UNREAD_MESSAGES:
            return False
        change, receive = self._change, self._receive
        if receive is None or self._messages or change is None or change.done():
            self._messages.append(message)
            self._wake()
            return True
        try:
            if (rest := receive(message)) is not None:
                self._change = None
                change.set_result(rest)
        except Exception as error:  # noqa: BLE001 - `each` raises it
            if not change.done():
                change.set_exception(error)
            # The error's frames have this one: in a cycle they would keep what they hold.
            del change
        return True

    async def put(self, message: Message) -> None:
        """Waits for room, then queues the message, or drops the message if the pipe is closed."""
        while len(self._messages) >= UNREAD_MESSAGES and not self._closed:
            self._change = self._loop.create_future()
            await self._change
        if not self._closed:
            self._messages.append(message)
            self._wake()

    async def get(self) -> Message | None:
        """Returns the next message; None at the end."""
        while not self._messages:
            if self._closed:
                return None
            self._change = self._loop.create_future()
            if (rest := await self._change) is not None:
                await rest()
        message = self._messages.popleft()
        if self._change is not None:
            self._wake()
        return message

    async def each(self, receive: Receive[Message]) -> None:
        """Passes every message to `receive`, most at once. Raises the error of `receive`."""
        self._receive = receive
        try:
            while (message := await self.get()) is not None:
                if (rest := receive(message)) is not None:
                    await rest()
        finally:
            self._receive = None

    def close(self) -> None:
        """Ends the messages. Unread messages can still be read."""
        self._closed = True
        self._wake()

    def drop(self) -> None:
        """Ends and forgets them."""
        self._messages.clear()
        self.close()

    def _wake(self) -> None:
        change, self._change = self._change, None
        if change is not None and not change.done():
            change.set_result(None)


class InMemoryCall(Call[Request, Response]):
    """A call as seen by the client, with the task of the handler."""

    def __init__(self, handler: Handler, timeout_seconds: float | None) -> None:
        self._requests = Pipe[Request]()
        self._responses = Pipe[Response]()
        self._open = True
        """Whether the client may write."""
        self._status: Status | None = None
        self._context = _Context(self._requests, self._responses, timeout_seconds)
        self._task = asyncio.create_task(self._run(handler))

    def write_now(self, request: Request) -> bool:
        return self._open and self._requests.put_now(request)

    async def write(self, request: Request) -> None:
        if not self._open:
            self._refuse()
        await self._requests.put(request)
        if not self._open:
            self._refuse()

    def half_close(self) -> None:
        self._open = False
        self._requests.close()

    async def read(self) -> Response | None:
        if (response := await self._responses.get()) is None:
            self._check_status()
        return response

    async def each(self, receive: Callable[[Response], None]) -> None:
        await self._responses.each(receive)
        self._check_status()

    def cancel(self) -> None:
        if self._status is None:
            self._end(Status(grpc.StatusCode.CANCELLED, "the call was cancelled"))
            self._task.cancel()
        self._responses.drop()

    async def _run(self, handler: Handler) -> None:
        context = self._context
        try:
            await _handle(handler, context)
            status = Status(grpc.StatusCode.OK, "")
        except grpc.aio.AbortError:
            status = Status(context.code, context.details, context.trailing)
        except asyncio.CancelledError:
            status = Status(grpc.StatusCode.CANCELLED, "the handler was cancelled")
        except BaseException as error:
            if not is_failure(error):
                raise
            refusal = Refusal.of(error)
            status = Status(refusal.status, refusal.details, tuple(refusal.metadata))
        self._end(status)

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
        self._open = False
        self._requests.drop()
        self._responses.close()

    def _refuse(self) -> NoReturn:
        """Raises what a write into an ended request raises."""
        self._check_status()
        if self._status is not None:
            raise CallEnded("the stream ended")
        raise grpc.aio.UsageError("the call was half-closed")

    def _check_status(self) -> None:
        if self._status is not None and self._status.code is not grpc.StatusCode.OK:
            raise as_error(self._status)


class _Context:
    """A call as seen by the handler: an RpcContext."""

    def __init__(
        self, requests: Pipe[Any], responses: Pipe[Any], timeout_seconds: float | None
    ) -> None:
        self._requests, self._responses = requests, responses
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout_seconds is None else self._loop.time() + timeout_seconds
        self.code, self.details = grpc.StatusCode.UNKNOWN, ""
        self.trailing: Any = ()

    def invocation_metadata(self) -> Any:
        return ()

    def peer(self) -> str:
        return PEER

    def auth_context(self) -> Mapping[str, Any]:
        return {}

    def time_remaining(self) -> Any:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    async def read(self) -> Any:
        request = await self._requests.get()
        return grpc.aio.EOF if request is None else request

    async def each(self, receive: Receive[Any]) -> None:
        await self._requests.each(receive)

    def write_now(self, message: Any) -> bool:
        return self._responses.put_now(message)

    async def write(self, message: Any) -> None:
        await self._responses.put(message)

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = tuple(trailing_metadata)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        self.code, self.details = code, details
        raise grpc.aio.AbortError(details)

    async def requests(self) -> AsyncIterator[Any]:
        while (request := await self._requests.get()) is not None:
            yield request


async def _handle(handler: Handler, context: _Context) -> None:
    """Runs a handler of a service of the mesh: a coroutine for a message or for a stream of messages."""
    given = context.requests() if handler.request_streaming else await context.read()
    response = await function_of(handler)(given, context)
    if not handler.response_streaming:
        await context.write(response)


class InMemoryConnection(Connection):
    """Opens calls on a server of this process. The server need not listen anywhere."""

    def __init__(self, server: GrpcServer) -> None:
        self._server = server

    def open(
        self, method: Method[Request, Response], timeout_seconds: float | None = None
    ) -> InMemoryCall[Request, Response]:
        handler = self._server.handler_of(method.path)
        if handler is None:
            raise Unavailable(f"no service of this process has {method.path}")
        return InMemoryCall(handler, timeout_seconds)
