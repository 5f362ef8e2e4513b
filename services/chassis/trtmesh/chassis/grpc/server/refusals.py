"""Calls refused before the choice of a handler."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from trtmesh.chassis.grpc.metadata import metadata_block
from trtmesh.chassis.grpc.server.call import CallConnection
from trtmesh.chassis.grpc.server.headers import check_trailers, response_headers, trailers
from trtmesh.chassis.http2.frames import Buffer, ErrorCode, Http2StreamError
from trtmesh.chassis.http2.headers import HeaderBlock
from trtmesh.chassis.http2.writer import SendStream
from trtmesh.chassis.rpc import Refusal

FIRST_MESSAGE_SECONDS = 0.1
"""Longest wait of a refusal for the first message, usually sent with the headers."""


class RefusedCall:
    """A call without a handler. Ends at the first message, or soon without a message: grpc.aio reports INTERNAL for a
    call ended while the message is being sent."""

    held = unread = 0
    idle = False
    """A timer ends it."""

    def __init__(
        self, refusal: Refusal, stream: SendStream, connection: CallConnection[Any]
    ) -> None:
        self.stream = stream
        self.ended_by_peer = False
        self._refusal = refusal
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._message_begun = False
        self._timer: asyncio.Handle = self._loop.call_later(FIRST_MESSAGE_SECONDS, self._end)

    def receive_data(self, data: Buffer, flow_size: int) -> None:
        if not self._message_begun:
            self._message_begun = True
            self._timer.cancel()
            # After this frame, possibly the last of the stream.
            self._timer = self._loop.call_soon(self._end)

    def receive_end_stream(self) -> None:
        self.ended_by_peer = True
        self._end()

    def receive_trailers(self, block: HeaderBlock) -> None:
        """Takes a second header block. Raises Http2StreamError."""
        if not block.end_stream:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "trailers without END_STREAM")
        check_trailers(block.fields)
        self.receive_end_stream()

    def receive_rst_stream(self, code: ErrorCode) -> None:
        self.ended_by_peer = True
        self._over()

    def shed(self) -> None:
        """Holds nothing."""

    def fail(self, code: ErrorCode) -> None:
        self._connection.writer.reset_stream(self.stream, code)
        self._over()

    def disconnect(self, reason: str) -> None:
        self._over()

    def end_with(self, status: grpc.StatusCode, details: str) -> None:
        """Ends the call with the refusal when the server stops."""
        self._end()

    def end_if_overdue(self) -> None:
        """A timer ends it."""

    def _end(self) -> None:
        refusal = self._refusal
        block = trailers(refusal.status, refusal.details, metadata_block(refusal.metadata))
        self._connection.writer.send_trailers(
            self.stream, response_headers() + block, reset=not self.ended_by_peer
        )
        self._over()

    def _over(self) -> None:
        self._timer.cancel()
        self._connection.forget(self.stream.stream_id)
