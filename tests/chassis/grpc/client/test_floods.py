"""A server that sends what costs work and answers nothing loses the connection, as a client would."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from chassis.grpc.client.scripted_server import HEAD, Peer, called, headers, method
from chassis.grpc.server.wire import Wire, raw_settings
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.http2.frames import (
    PADDED,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    rst_stream,
    window_update,
)

FLOODS: dict[str, Callable[[Wire], bytes]] = {
    "1xx": lambda wire: headers(wire, 1, {":status": "103"}) * 200,
    "SETTINGS": lambda _: raw_settings((Setting.INITIAL_WINDOW_SIZE, 1)) * 200,
    "PING": lambda _: frame(FrameType.PING, 0, 0, bytes(8)) * 2000,
    "PRIORITY": lambda _: frame(FrameType.PRIORITY, 0, 1, bytes(5)) * 4000,
    "unknown frames": lambda _: frame(99, 0, 0) * 3000,
    "large unknown frame": lambda _: frame(99, 0, 0, bytes(2**15 + 1)),
    "WINDOW_UPDATE": lambda _: window_update(0, 1) * 4000,
    "empty DATA": lambda wire: headers(wire, 1, HEAD) + frame(FrameType.DATA, 0, 1) * 3000,
    "padded DATA": lambda wire: (
        headers(wire, 1, HEAD) + frame(FrameType.DATA, PADDED, 1, b"\1\0") * 3000
    ),
    "RST_STREAM": lambda _: rst_stream(1, ErrorCode.CANCEL) * 8000,
    "CONTINUATION": lambda _: (
        frame(FrameType.HEADERS, 0, 1) + frame(FrameType.CONTINUATION, 0, 1) * 4000
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_the_connection(peer: Peer, flood: str) -> None:
    async with called(peer, "Wait") as (connection, wire, call):
        wire.send(FLOODS[flood](wire))
        found = await wire.next(FrameType.GOAWAY)
        assert ErrorCode.parse(found.payload[4:8]) == ErrorCode.ENHANCE_YOUR_CALM
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        with pytest.raises(Unavailable):
            connection.open(method("Wait"))
