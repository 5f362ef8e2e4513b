"""How much is sent and held, with a client that sends its own frames."""

from __future__ import annotations

from itertools import repeat

import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example
from chassis.grpc.server.wire import message, raw_settings, wired
from trtmesh.chassis.http2.frames import (
    END_STREAM,
    FIRST_WINDOW_BYTES,
    MOST_WINDOW_BYTES,
    ErrorCode,
    Kind,
    Setting,
    frame,
    reset,
    window_update,
)


async def test_data_stays_within_the_windows(example: Example) -> None:
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,40"))
        assert len((await wire.next(Kind.DATA)).payload) == 10
        # Smaller first windows make an open one negative, and what opens it counts from there.
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 5)), window_update(1, 5))
        wire.send(window_update(1, 3), frame(Kind.PING, 0, 0, bytes(8)))
        found = await wire.next(Kind.DATA, Kind.PING)
        assert (found.kind, len(found.payload)) == (Kind.DATA, 3)
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, FIRST_WINDOW_BYTES)))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (45 - 13, "0")


async def test_data_that_new_settings_let_go_follows_their_acknowledgement(
    example: Example,
) -> None:
    """Until it reads that, a client counts by the windows it had before."""
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b"1,40"))
        await wire.next(Kind.DATA)
        wire.send(raw_settings((Setting.INITIAL_WINDOW_SIZE, 1000)))
        assert (await wire.next(Kind.SETTINGS, Kind.DATA)).kind == Kind.SETTINGS
        body, _ = await wire.answer(1)
        assert len(body) == 35


async def test_the_connections_window_is_shared_in_turns(example: Example) -> None:
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 2**20}) as wire:
        for stream in (1, 3):
            wire.send(wire.call(stream, "Many"), wire.data(stream, b"1,200000"))
        got = {1: 0, 3: 0}
        while sum(got.values()) < FIRST_WINDOW_BYTES:
            found = await wire.next(Kind.DATA)
            got[found.stream] += len(found.payload)
        assert sum(got.values()) == FIRST_WINDOW_BYTES
        wire.send(window_update(0, 40_000))
        while sum(got.values()) < FIRST_WINDOW_BYTES + 40_000:
            found = await wire.next(Kind.DATA)
            got[found.stream] += len(found.payload)
        assert min(got.values()) >= 16_384
        wire.send(reset(1, ErrorCode.CANCEL), window_update(0, 2**20))
        body, _ = await wire.answer(3)
        assert got[3] + len(body) == 200_005


async def test_a_long_message_is_let_in_whole(example: Example) -> None:
    body = b"x" * MOST_BYTES
    async with wired(example) as wire:
        data, left = message(body), FIRST_WINDOW_BYTES
        wire.send(wire.call(1, "Fail"))
        sent = 0
        while sent < len(data):
            size = min(2**14, left, len(data) - sent)
            if size:
                wire.send(frame(Kind.DATA, 0, 1, data[sent : sent + size]))
                sent, left = sent + size, left - size
            else:
                grown = await wire.next(Kind.WINDOW_UPDATE, stream=1)
                left += int.from_bytes(grown.payload)
        wire.send(frame(Kind.DATA, END_STREAM, 1))
        assert (await wire.answer(1))[1]["grpc-status"] == "15"


async def test_a_call_that_does_not_read_holds_one_window(example: Example) -> None:
    async with wired(example) as wire:
        wire.send(wire.call(1, "Ignore"))
        wire.send(*[frame(Kind.DATA, 0, 1, message(bytes(1019)))] * 63)
        await wire.echoes(3)
        wire.send(frame(Kind.DATA, 0, 1, message(bytes(1018))))
        await wire.echoes(5)
        wire.send(frame(Kind.DATA, 0, 1, b"\0"))
        assert await wire.error() == (1, ErrorCode.FLOW_CONTROL_ERROR)


@pytest.mark.parametrize("what", ["pings", "calls that fail"])
async def test_a_client_that_asks_and_does_not_read_is_cut_off(
    example: Example, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("trtmesh.chassis.http2.writer.MOST_UNREAD_BYTES", 2**18)
    example.hold_unread(4096)
    async with wired(example, receive_bytes=4096) as wire, wired(example) as other:
        asks = {
            "pings": repeat(frame(Kind.PING, 0, 0, bytes(8))),
            "calls that fail": (
                wire.call(stream, "Fail") + wire.data(stream, b"x" * 4000)
                for stream in range(1, MOST_WINDOW_BYTES, 2)
            ),
        }
        with pytest.raises(ConnectionError):
            await wire.send_all(asks[what])
        await other.echoes(1)


async def test_a_write_that_waited_is_dropped_when_its_call_ended_meanwhile(
    example: Example,
) -> None:
    """Data behind the end of a stream ends the connection with some clients."""
    async with wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "WriteLate"), wire.data(1, b""))
        await wire.next(Kind.DATA)
        wire.send(window_update(1, 1000))
        body, said = await wire.answer(1)
        assert (len(body), said["grpc-status"]) == (95, "0")
        await example.late.wait()
        wire.send(frame(Kind.PING, 0, 0, bytes(8)))
        assert (await wire.next(Kind.PING, Kind.DATA)).kind == Kind.PING
