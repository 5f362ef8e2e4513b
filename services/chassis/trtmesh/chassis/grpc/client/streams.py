"""The calls on one connection to a server."""

from __future__ import annotations

from functools import partial
from typing import Any

from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client.call import ClientCall, Method, Request, Response
from trtmesh.chassis.grpc.client.headers import request_head
from trtmesh.chassis.http2.frames import ConnectionFailed, ErrorCode, Setting
from trtmesh.chassis.http2.headers import HeaderBlock
from trtmesh.chassis.http2.streams import Streams
from trtmesh.chassis.http2.writer import Output


class OpenedStreams(Streams[ClientCall[Any, Any]]):
    """The streams that this client opened."""

    def __init__(self, output: Output, peer: str, most_message_bytes: int) -> None:
        super().__init__(output, peer)
        self._most_message_bytes = most_message_bytes
        self._most_calls: int | None = None
        self._closed = ""

    def open(
        self, method: Method[Request, Response], authority: str, timeout: float | None
    ) -> ClientCall[Request, Response]:
        """Begins a call. Raises Unavailable where the server takes none."""
        if self._closed:
            raise Unavailable(self._closed)
        if self._most_calls is not None and len(self._calls) >= self._most_calls:
            raise Unavailable(f"it takes {self._most_calls} calls at once and no more")
        number = self._last_stream = self._last_stream + 2 if self._last_stream else 1
        stream = self._output.open(number)
        call = ClientCall(
            method,
            stream,
            self._output,
            partial(self._grant, number),
            partial(self._calls.__delitem__, number),
            self._most_message_bytes,
        )
        self._calls[number] = call
        self._output.send_head(stream, request_head(method.path, authority, timeout))
        return call

    def lose(self, why: str) -> None:
        """Ends every call, and lets none begin."""
        self._closed = self._closed or why
        super().lose(self._closed)

    def _on_block(self, block: HeaderBlock) -> None:
        if block.stream % 2 == 0 or block.stream > self._last_stream:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "a stream was never opened")
        if (call := self._calls.get(block.stream)) is not None:
            call.take_block(block)

    def _on_go_away(self, last_stream: int, code: ErrorCode, why: str) -> None:
        said = f"it takes no more calls: {code.name}" + (f": {why}" if why else "")
        self._closed = said
        for number, call in list(self._calls.items()):
            if number > last_stream:
                call.lost(said)

    def _on_setting(self, name: int, value: int) -> None:
        if name == Setting.MAX_CONCURRENT_STREAMS:
            self._most_calls = value
