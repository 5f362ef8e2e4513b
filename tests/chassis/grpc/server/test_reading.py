"""A call with many messages at hand gives way to other calls."""

from __future__ import annotations

import asyncio

import pytest
from chassis.grpc.server.conftest import Example
from chassis.grpc.server.wire import message, wired
from trtmesh.chassis.fair.turns import StartScheduler
from trtmesh.chassis.grpc.server import call as server_call
from trtmesh.chassis.http2.frames import END_STREAM, ErrorCode, FrameType, frame, rst_stream

MESSAGES = 2000
FLOOD = b"".join(message(b"%04d" % number) for number in range(MESSAGES))


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams of the turns that were asked for, each for one message."""
    asked: list[int] = []
    another_turn = server_call.ServerCall._another_turn

    async def counted(call: server_call.ServerCall) -> None:
        asked.append(call.stream.stream_id)
        await another_turn(call)

    monkeypatch.setattr(server_call.ServerCall, "_another_turn", counted)
    monkeypatch.setattr(server_call, "READING_SECONDS", 0.0)
    return asked


async def begin(turns: list[int]) -> None:
    while not turns:  # noqa: ASYNC110 - the server sets no event
        await asyncio.sleep(0)


async def test_other_calls_go_on_between_messages(example: Example, turns: list[int]) -> None:
    async with wired(example) as wire, wired(example) as other:
        wire.send(wire.call(1, "Join"), frame(FrameType.DATA, END_STREAM, 1, FLOOD))
        await begin(turns)
        await other.echoes(1)
        assert len(turns) < MESSAGES
        body, said = await wire.answer(1)
    assert body == message(b"".join(b"%04d" % number for number in range(MESSAGES)))
    assert said["grpc-status"] == "0"
    assert turns.count(1) >= MESSAGES - 1


async def test_a_reset_ends_a_call_that_waits_for_its_turn(
    example: Example, turns: list[int]
) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Join"), frame(FrameType.DATA, END_STREAM, 1, FLOOD))
        await begin(turns)
        wire.send(rst_stream(1, ErrorCode.CANCEL))
        await wire.echoes(3)
        before = len(turns)
        await wire.echoes(5)
        assert len(turns) == before < MESSAGES


async def test_a_handler_cancelled_in_the_pass_of_its_turn_holds_up_no_other_call(
    example: Example, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = server_call.ServerCall.proceed
    cancelled: list[int] = []

    def cancelled_before(call: server_call.ServerCall) -> None:
        if call._turn is not None and call._task is not None:
            # As a Triton stream ends with the failure of one of its requests.
            cancelled.append(call.stream.stream_id)
            call._task.cancel()
        proceed(call)

    monkeypatch.setattr(server_call.ServerCall, "proceed", cancelled_before)
    monkeypatch.setattr(StartScheduler, "enter", lambda _: False)
    async with wired(example) as wire:
        wire.send(wire.call(1, "Join"), frame(FrameType.DATA, END_STREAM, 1, FLOOD))
        await begin(turns)
        _, said = await wire.answer(1)
        assert said["grpc-status"] == "1"
        assert cancelled == [1]
        await wire.echoes(3)
