"""The calls of one client's connection."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

import grpc
from trtmesh.chassis.grpc.server.call import Call, Handler
from trtmesh.chassis.grpc.server.headers import CallHead, NoCall, http_answer, parse_head
from trtmesh.chassis.http2.frames import ConnectionFailed, ErrorCode, StreamFailed
from trtmesh.chassis.http2.headers import HEADER_LIST_BYTES, HeaderBlock
from trtmesh.chassis.http2.streams import Streams
from trtmesh.chassis.http2.writer import Output

MOST_CALLS = 16_384
"""Calls of one connection that run at once, those included whose clients have gone and whose handlers have not."""


class Owner(Protocol):
    """What calls need of their server."""

    most_message_bytes: int

    def find_handler(self, head: CallHead) -> Handler | None:
        """Who serves a call; None where nobody does."""


class ServedStreams(Streams[Call]):
    """The streams that a client opened."""

    def __init__(self, owner: Owner, output: Output, peer: str) -> None:
        super().__init__(output, peer)
        self._owner = owner
        self._leaving = False

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Of the calls that run."""
        return [call.task for call in self._calls.values()]

    def leave(self) -> None:
        """Takes no new call; those that run go on."""
        if not self._leaving:
            self._leaving = True
            self.fail(ErrorCode.NO_ERROR)

    def fail(self, code: ErrorCode, why: str = "") -> None:
        """Tells the client which call was the last, and why."""
        self.say_farewell(code, self._last_stream, why)

    def cut_off(self) -> None:
        """Ends every call, with a status that lets clients ask another server."""
        for call in list(self._calls.values()):
            call.end_with(grpc.StatusCode.UNAVAILABLE, "the server stops")

    def _on_block(self, block: HeaderBlock) -> None:
        stream = block.stream
        if stream > self._last_stream:
            if stream % 2 == 0:
                raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "clients open odd streams")
            self._last_stream = stream
            self._open(block)
        elif (call := self._calls.get(stream)) is not None:
            if not block.ends_stream:
                raise StreamFailed(ErrorCode.PROTOCOL_ERROR, "headers came behind data")
            call.half_closed()
        elif stream % 2 == 0:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "clients open odd streams")

    def _open(self, block: HeaderBlock) -> None:
        stream = block.stream
        if self._leaving or len(self._calls) >= MOST_CALLS:
            raise StreamFailed(ErrorCode.REFUSED_STREAM, "there are too many calls")
        try:
            head = parse_head(block.fields)
        except NoCall as error:
            answer = http_answer(error.status)
            self._output.finish(self._output.open(stream), answer, half_closed=block.ends_stream)
            return
        call = Call(
            head,
            self._owner.find_handler(head),
            self._output.open(stream),
            self._output,
            partial(self._grant, stream),
            self._peer,
            self._owner.most_message_bytes,
        )
        self._calls[stream] = call
        call.task.add_done_callback(partial(self._forget, stream))
        if block.ends_stream:
            call.half_closed()
        if block.size > HEADER_LIST_BYTES:
            call.end_with(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"metadata has {block.size} bytes, and at most {HEADER_LIST_BYTES} are taken",
            )

    def _forget(self, stream: int, task: asyncio.Task[None]) -> None:
        del self._calls[stream]

    def _on_go_away(self, last_stream: int, code: ErrorCode, why: str) -> None:
        """The client opens nothing more, and closes when it has what it wants."""

    def _on_setting(self, name: int, value: int) -> None:
        """Clients have no other that concerns a server."""
