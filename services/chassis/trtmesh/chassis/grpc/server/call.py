"""One call: its handler runs in a task of its own and is given the context that handlers of grpc.aio are given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
from trtmesh.chassis.grpc.messages import BadMessage, MessageReader
from trtmesh.chassis.grpc.metadata import Metadata, metadata_block
from trtmesh.chassis.grpc.server.headers import CallHead, response_head, trailers
from trtmesh.chassis.http2.frames import FIRST_WINDOW_BYTES, ErrorCode, reset
from trtmesh.chassis.http2.input import Input
from trtmesh.chassis.http2.writer import Output, OutStream
from trtmesh.chassis.logs import request_id_bound
from trtmesh.chassis.rpc import request_id_of

log = logging.getLogger(__name__)

LINGER_SECONDS = 30.0
"""How long the end of a response may wait behind data that its client does not read."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class Call(grpc.aio.ServicerContext[Any, Any]):
    """A call from its headers to its trailers. Whoever ends it early cancels its task."""

    def __init__(
        self,
        head: CallHead,
        handler: Handler | None,
        stream: OutStream,
        output: Output,
        grant: Callable[[int], None],
        peer: str,
        most_message_bytes: int,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._metadata = head.metadata
        self._input = Input(
            MessageReader(head.encoding, most_message_bytes), FIRST_WINDOW_BYTES, grant
        )
        self._output = output
        self._peer = peer
        self._most_bytes = most_message_bytes
        self._deadline = None if head.timeout is None else self._loop.time() + head.timeout
        self._begun = False
        self._over = False
        self._started = False
        self._code = grpc.StatusCode.OK
        self._details = ""
        self._trailing = b""
        self.stream = stream
        self.task = self._loop.create_task(self._live())

    def take(self, size: int, data: bytes) -> None:
        """Takes the payload of a frame that counts `size` bytes. Raises StreamFailed."""
        if self._over:
            return
        try:
            self._input.take(size, data)
        except BadMessage as error:
            self.end_with(error.status, str(error))

    def half_closed(self) -> None:
        """The client has sent its last message."""
        self._input.end()

    def end_with(self, status: grpc.StatusCode, details: str) -> None:
        """Ends the call whatever its handler does."""
        if not self._over:
            self._end(status, details)
            self._stop_handler()

    def reset(self, code: ErrorCode) -> None:
        """Ends the call without a status: its client broke a rule."""
        self.was_reset(code)
        self._output.put(reset(self.stream.number, code))

    def lost(self, why: str) -> None:
        """The client is gone."""
        self.was_reset(ErrorCode.CANCEL)

    def was_reset(self, code: ErrorCode) -> None:
        """The client has lost interest. A handler that was cancelled, or is done, is left to clean up."""
        self._output.forget(self.stream)
        if not self._over:
            self._over = True
            self._stop_handler()

    async def read(self) -> Any:
        """The next request message, or grpc.aio.EOF."""
        data = await self._input.next()
        return grpc.aio.EOF if data is None else self._deserialised(data)

    async def write(self, message: Any) -> None:
        """Sends a message; returns when the client's windows took all of it. What a cancelled write left is sent
        before anything else."""
        self._check_going()
        data = self._serialised(message)
        if len(data) > self._most_bytes:
            await self.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"Sent message larger than max ({len(data)} vs. {self._most_bytes})",
            )
        output, stream = self._output, self.stream
        if stream.unsent:
            await output.drain(stream)
            self._check_going()
        if not self._begun:
            self._begin()
        output.send(stream, data)
        if stream.unsent:
            await output.drain(stream)

    def _check_going(self) -> None:
        if self._over:
            raise asyncio.CancelledError("the call is over")

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Begins the response, which can be done once."""
        if self._begun or self._over:
            raise grpc.aio.UsageError("the response has begun")
        self._begin(tuple(initial_metadata))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> NoReturn:
        """Ends the call with a status that is not OK. Raises AbortError, always."""
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, f"aborted with OK: {details}"
        if trailing_metadata:
            self.set_trailing_metadata(trailing_metadata)
        self._end(code, details)
        raise grpc.aio.AbortError(details)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = metadata_block(trailing_metadata)

    def invocation_metadata(self) -> Any:
        return self._metadata

    def time_remaining(self) -> Any:
        """Seconds until the deadline, None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def set_compression(self, compression: grpc.Compression) -> None:
        raise NotImplementedError("responses are sent uncompressed")

    def disable_next_message_compression(self) -> None:
        """Nothing to disable."""

    async def _live(self) -> None:
        """Handle → end → see the last bytes off."""
        if self._over:
            return
        self._started = True
        with _Expiry(self, self._deadline):
            try:
                await self._handle()
                self._end(self._code, self._details)
            except grpc.aio.AbortError as error:
                self._end(grpc.StatusCode.UNKNOWN, str(error))
            except BadMessage as error:
                self._end(error.status, str(error))
            except asyncio.CancelledError:
                self._end(grpc.StatusCode.CANCELLED, "the handler was cancelled")
            except Exception as error:
                # Broad on purpose: a defect must reach the caller as a status, not as a broken connection.
                if self._code is grpc.StatusCode.OK:
                    with request_id_bound(request_id_of(self)):
                        log.exception("a call failed for an unforeseen reason")
                    self.set_code(grpc.StatusCode.UNKNOWN)
                    self.set_details(f"{type(error).__name__}: {error}")
                self._end(self._code, self._details)
        await self._linger()

    async def _handle(self) -> None:
        handler = self._handler
        if handler is None:
            await self.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        given = self._requests() if handler.request_streaming else await self._only_request()
        answer = _behaviour(handler)(given, self)
        if not hasattr(answer, "__aiter__"):
            response = await answer
            if not handler.response_streaming and self._code is grpc.StatusCode.OK:
                await self.write(response)
            return
        try:
            async for response in answer:
                await self.write(response)
        finally:
            await answer.aclose()

    async def _requests(self) -> AsyncIterator[Any]:
        while (data := await self._input.next()) is not None:
            yield self._deserialised(data)

    async def _only_request(self) -> Any:
        if (data := await self._input.next()) is None:
            raise BadMessage(grpc.StatusCode.UNIMPLEMENTED, "the call has no request message")
        return self._deserialised(data)

    def _deserialised(self, data: bytes) -> Any:
        assert self._handler is not None
        read = self._handler.request_deserializer
        try:
            return data if read is None else read(data)
        except Exception as error:
            # Broad on purpose: whatever a message cannot be read for, the client is told.
            raise BadMessage(
                grpc.StatusCode.INTERNAL, f"Exception deserializing request! {error}"
            ) from error

    def _serialised(self, message: Any) -> bytes:
        assert self._handler is not None
        write = self._handler.response_serializer
        data: bytes = message if write is None else write(message)
        return data

    def _begin(self, metadata: Metadata = ()) -> None:
        self._begun = True
        self._output.send_head(self.stream, response_head(metadata))

    def _end(self, status: grpc.StatusCode, details: str) -> None:
        """Sends the status, unless the call is over."""
        if self._over:
            return
        block = trailers(status, details, self._trailing)
        self._over = True
        if not self._begun:
            block = response_head() + block
        self._output.finish(self.stream, block, half_closed=self._input.ended)

    def _stop_handler(self) -> None:
        """Where the task has not started, it will see that there is nothing to handle: cancelled now it would end with
        an error, which holds the call, which holds the task."""
        if self._started:
            self.task.cancel()

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                await self._output.drain(self.stream)
        except TimeoutError:
            self._output.reset(self.stream, ErrorCode.CANCEL)


class _Expiry:
    """Ends a call at its deadline, on the event loop's clock."""

    def __init__(self, call: Call, deadline: float | None) -> None:
        self._call = call
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        if self._deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._deadline, self._expire)

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self._call.end_with(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")


def _behaviour(handler: Handler) -> Callable[[Any, Call], Any]:
    found: Any = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    function: Callable[[Any, Call], Any] = found
    return function
