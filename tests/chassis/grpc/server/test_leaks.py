"""Ended calls and connections are freed by reference counting: services rarely run the garbage collector."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator

import pytest
from chassis.grpc.server.conftest import GUEST, Example
from chassis.grpc.server.wire import Wire, wired
from leaks import gone, without_collector
from trtmesh.chassis import rpc
from trtmesh.chassis.grpc.server.call import ServerCall
from trtmesh.chassis.grpc.server.connection import ServerConnection
from trtmesh.chassis.grpc.server.refusals import RefusedCall
from trtmesh.chassis.http2.frames import (
    END_STREAM,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    rst_stream,
    window_update,
)


@pytest.fixture(autouse=True)
def _no_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest keeps log records, and they keep their arguments.
    monkeypatch.setattr(rpc.log, "disabled", True)
    with without_collector():
        yield


async def _answered(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1), wire.data(1, b""))
    await wire.answer(1)
    example.contexts.clear()


async def _streamed(wire: Wire, example: Example) -> None:
    for stream, method in ((1, "Many"), (3, "Write")):
        wire.send(wire.call(stream, method), wire.data(stream, b"5,5"))
        await wire.answer(stream)


async def _chatted(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Chat"), wire.data(1, b"a", 0), wire.data(1, b"b"))
    await wire.answer(1)


async def _left_early(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "First"), wire.data(1, b"a", 0))
    await wire.answer(1)


async def _aborted(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Fail"), wire.data(1, b"told"))
    await wire.answer(1)


async def _failed(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Fail"), wire.data(1, b"defect"))
    await wire.answer(1)


async def _refused_by_an_error_in_its_frames(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Fail"), wire.data(1, b"kept"))
    await wire.answer(1)


async def _unknown(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "None", END_STREAM))
    await wire.answer(1)


async def _refused_by_the_guard(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, changes=GUEST), wire.data(1, b"x"))
    await wire.answer(1)


async def _refused_and_reset(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, changes=GUEST), rst_stream(1, ErrorCode.CANCEL))


async def _cut_off(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Chat"), frame(FrameType.DATA, END_STREAM, 1, b"\0\0"))
    await wire.answer(1)


async def _expired(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Wait", changes={"grpc-timeout": "1m"}), wire.data(1, b""))
    await wire.answer(1)


async def _cancelled(wire: Wire, example: Example) -> None:
    for stream, method in ((1, "Wait"), (3, "Ignore"), (5, "Chat")):
        wire.send(wire.call(stream, method), wire.data(stream, b"", END_STREAM * (stream == 1)))
    await example.waiting.wait()
    for stream in (1, 3, 5):
        wire.send(rst_stream(stream, ErrorCode.CANCEL))


async def _cancelled_at_once(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Wait"), rst_stream(1, ErrorCode.CANCEL))


async def _refused_at_once(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Wait"), window_update(1, 0))
    await wire.error()


async def _cancelled_while_it_writes(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "Many"), wire.data(1, b"5,100"))
    await wire.next(FrameType.DATA)
    wire.send(rst_stream(1, ErrorCode.CANCEL))


async def _cancelled_while_its_end_waits(wire: Wire, example: Example) -> None:
    wire.send(wire.call(1, "WriteLate"), wire.data(1, b""))
    await wire.next(FrameType.DATA)
    wire.send(rst_stream(1, ErrorCode.CANCEL))


async def _lost(wire: Wire, example: Example) -> None:
    for stream, method in ((1, "Wait"), (3, "Ignore"), (5, "Many")):
        wire.send(wire.call(stream, method), wire.data(stream, b"5,100", END_STREAM))
    await example.waiting.wait()


ENDS: list[Callable[[Wire, Example], Awaitable[None]]] = [
    _answered,
    _streamed,
    _chatted,
    _left_early,
    _aborted,
    _failed,
    _refused_by_an_error_in_its_frames,
    _unknown,
    _refused_by_the_guard,
    _refused_and_reset,
    _cut_off,
    _expired,
    _cancelled,
    _cancelled_at_once,
    _refused_at_once,
    _cancelled_while_it_writes,
    _cancelled_while_its_end_waits,
    _lost,
]


@pytest.mark.parametrize("end", ENDS)
async def test_ended_calls_and_connections_are_freed(
    example: Example, end: Callable[[Wire, Example], Awaitable[None]]
) -> None:
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 50}) as wire:
        await end(wire, example)
        if end is not _lost:
            wire.send(frame(FrameType.PING, 0, 0, bytes(8)))
            await wire.next(FrameType.PING)
            await gone(ServerCall, RefusedCall)
    await gone(ServerCall, RefusedCall, ServerConnection)
