"""Flow control of the server, with scripted client frames."""

from __future__ import annotations

from itertools import repeat

import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example
from chassis.grpc.server.wire import message, raw_settings, wired
from trtmesh.chassis.http2.frames import (
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    MAX_WINDOW_SIZE,
    ErrorCode,
    FrameType,
    Setting,
    frame,
    rst_stream,
    window_update,
)
from trtmesh.chassis.http2.writer import MAX_DATA_SIZE


async def test_data_stays_within_the_window(example: Example) -> None:
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,40"))
        assert len((await wire.next(FrameType.DATA)).payload) == 10
        # A smaller INITIAL_WINDOW_SIZE makes the open window negative, before the WINDOW_UPDATE.
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 5)), window_update(1, 5))
        wire.send(window_update(1, 3), frame(FrameType.PING, 0, 0, bytes(8)))
        found = await wire.next(FrameType.DATA, FrameType.PING)
        assert (found.type, len(found.payload)) == (FrameType.DATA, 3)
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, INITIAL_WINDOW_SIZE)))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (45 - 13, "0")


async def test_settings_ack_precedes_data_of_the_new_window(
    example: Example,
) -> None:
    """Before the ACK, a client counts by the old windows."""
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,40"))
        await wire.next(FrameType.DATA)
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 1000)))
        assert (await wire.next(FrameType.SETTINGS, FrameType.DATA)).type == FrameType.SETTINGS
        body, _ = await wire.answer(1)
        assert len(body) == 35


async def test_streams_share_the_connection_window_round_robin(example: Example) -> None:
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 2**20}) as wire:
        for stream in (1, 3):
            wire.send(wire.call(stream, "Many"), wire.data(stream, b"1,200000"))
        got, began = {1: 0, 3: 0}, set[int]()
        # Both must have data before the window opens again.
        while len(began) < 2 or sum(got.values()) < INITIAL_WINDOW_SIZE:
            found = await wire.next(FrameType.HEADERS, FrameType.DATA)
            began.add(found.stream_id)
            if found.type == FrameType.DATA:
                got[found.stream_id] += len(found.payload)
        assert sum(got.values()) == INITIAL_WINDOW_SIZE
        wire.send(window_update(0, 40_000))
        while sum(got.values()) < INITIAL_WINDOW_SIZE + 40_000:
            found = await wire.next(FrameType.DATA)
            got[found.stream_id] += len(found.payload)
        assert min(got.values()) >= 16_384
        wire.send(rst_stream(1, ErrorCode.CANCEL), window_update(0, 2**20))
        body, _ = await wire.answer(3)
        assert got[3] + len(body) == 200_005


async def test_message_longer_than_the_window_is_received(example: Example) -> None:
    body = b"x" * MOST_BYTES
    async with wired(example) as wire:
        data, left = message(body), INITIAL_WINDOW_SIZE
        wire.send(wire.call(1, "Fail"))
        sent = 0
        while sent < len(data):
            size = min(2**14, left, len(data) - sent)
            if size:
                wire.send(frame(FrameType.DATA, 0, 1, data[sent : sent + size]))
                sent, left = sent + size, left - size
            else:
                grown = await wire.next(FrameType.WINDOW_UPDATE, stream=1)
                left += int.from_bytes(grown.payload)
        wire.send(frame(FrameType.DATA, END_STREAM, 1))
        assert (await wire.answer(1))[1]["grpc-status"] == "15"


async def test_unread_call_holds_one_window(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Ignore"))
        wire.send(*[frame(FrameType.DATA, 0, 1, message(bytes(1019)))] * 63)
        await wire.echoes(3)
        wire.send(frame(FrameType.DATA, 0, 1, message(bytes(1018))))
        await wire.echoes(5)
        wire.send(frame(FrameType.DATA, 0, 1, b"\0"))
        assert await wire.error() == (1, ErrorCode.FLOW_CONTROL_ERROR)


async def test_large_message_reaches_a_slow_reader_in_small_frames(example: Example) -> None:
    """Frames as large as this client admits would fill the transport's buffer at once, as if it did not read."""
    example.hold_unread(4096)
    limits = {Setting.INITIAL_WINDOW_SIZE: 2**24, Setting.MAX_FRAME_SIZE: 2**24 - 1}
    async with wired(example, limits, receive_bytes=4096) as wire:
        wire.send(window_update(0, 2**24))
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,%d" % MOST_BYTES))
        received = 0
        while received < MOST_BYTES + 5:
            found = await wire.next(FrameType.DATA)
            assert len(found.payload) <= MAX_DATA_SIZE
            received += len(found.payload)
        assert (await wire.answer(1))[1]["grpc-status"] == "0"


@pytest.mark.parametrize("what", ["pings", "calls that fail"])
async def test_client_that_sends_without_reading_is_aborted(
    example: Example, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("trtmesh.chassis.http2.writer.MAX_UNREAD_BYTES", 2**18)
    example.hold_unread(4096)
    async with wired(example, receive_bytes=4096) as wire, wired(example) as other:
        asks = {
            "pings": repeat(frame(FrameType.PING, 0, 0, bytes(8))),
            "calls that fail": (
                wire.call(stream, "Fail") + wire.data(stream, b"x" * 4000)
                for stream in range(1, MAX_WINDOW_SIZE, 2)
            ),
        }
        with pytest.raises(ConnectionError):
            await wire.send_all(asks[what])
        await other.echoes(1)


async def test_waiting_write_is_dropped_after_the_call_ended(
    example: Example,
) -> None:
    """DATA after END_STREAM is a connection error for some clients."""
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "WriteLate"), wire.data(1, b""))
        await wire.next(FrameType.DATA)
        wire.send(window_update(1, 1000))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (95, "0")
        await example.late.wait()
        wire.send(frame(FrameType.PING, 0, 0, bytes(8)))
        assert (await wire.next(FrameType.PING, FrameType.DATA)).type == FrameType.PING
