"""Limits of connections: in all, of an address, and of age."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from chassis.grpc.server.wire import message, wired
from counting import counted_lines
from trtmesh.chassis.connection_settings import ConnectionSettings
from trtmesh.chassis.fair.limits import ConnectionCounts, origin_of
from trtmesh.chassis.grpc.server import GrpcServer
from trtmesh.chassis.grpc.server import connection as server_connection
from trtmesh.chassis.http2 import connection as http2_connection
from trtmesh.chassis.http2.frames import ErrorCode, FrameType


@asynccontextmanager
async def limited(settings: ConnectionSettings) -> AsyncIterator[Example]:
    async with serving(Example(server=GrpcServer(MOST_BYTES, connections=settings))) as example:
        yield example


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (ConnectionSettings(max_open=2), b"the server has 2 connections, its limit"),
        (
            ConnectionSettings(max_per_address=2),
            b"127.0.0.1 has 2 connections, the limit of an address",
        ),
    ],
)
async def test_a_connection_beyond_the_limit_is_told_and_closed(
    settings: ConnectionSettings, reason: bytes
) -> None:
    async with limited(settings) as example, wired(example) as first:
        async with wired(example) as second:
            await first.echoes(1)
            await second.echoes(1)
            async with wired(example, greet=False) as third:
                goaway = await third.next(FrameType.GOAWAY)
                assert ErrorCode.parse(goaway.payload[4:8]) == ErrorCode.ENHANCE_YOUR_CALM
                assert goaway.payload[8:] == reason
                assert await third.closed() == b""
            await first.echoes(3)
        await asyncio.to_thread(lambda: None)
        while len(example.server.clients.open) > 1:  # noqa: ASYNC110 - a set has no event
            await asyncio.sleep(0)
        async with wired(example) as fourth:
            await fourth.echoes(1)


async def test_an_old_connection_ends_after_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.5)
    async with limited(ConnectionSettings(max_age_seconds=0.01)) as example, wired(example) as wire:
        wire.send(wire.call(1, "Chat"))
        ping = await wire.farewell()
        # A client opens calls until it has read of the end.
        await wire.echoes(3)
        assert await wire.refuses(ping) == 3
        wire.send(wire.call(5), wire.data(5, b"too late"))
        assert await wire.error() == (5, ErrorCode.REFUSED_STREAM)
        wire.send(wire.data(1, b"ab"))
        body, said = await wire.answer(1)
        assert (body, said["grpc-status"]) == (message(b"ba"), "0")
        await wire.closed()


async def test_an_old_connection_without_calls_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http2_connection, "PING_AFTER_SECONDS", 0.5)
    async with limited(ConnectionSettings(max_age_seconds=0.01)) as example, wired(example) as wire:
        assert await wire.refuses(await wire.farewell()) == 0
        assert await wire.closed() == b""


async def test_a_client_that_answers_no_ping_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_connection, "FAREWELL_SECONDS", 0.1)
    async with limited(ConnectionSettings()) as example, wired(example) as wire:
        await wire.echoes(1)
        example.server.retire_connections()
        await wire.farewell()
        await wire.next(FrameType.GOAWAY)
        assert await wire.closed() == b""


async def test_retired_connections_end_after_their_calls_and_later_ones_are_served() -> None:
    async with (
        limited(ConnectionSettings()) as example,
        wired(example) as busy,
        wired(example) as idle,
    ):
        busy.send(busy.call(1, "Chat"))
        await idle.echoes(1)
        # Its call has begun, too, once the other has been answered.
        await asyncio.to_thread(lambda: None)
        example.server.retire_connections()
        for wire in (busy, idle):
            assert await wire.refuses(await wire.farewell()) == 1
        assert await idle.closed() == b""
        async with wired(example) as later:
            await later.echoes(1)
            busy.send(busy.data(1, b"ab"))
            body, said = await busy.answer(1)
            assert (body, said["grpc-status"]) == (message(b"ba"), "0")
            await busy.closed()
            await later.echoes(3)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
    ],
)
def test_addresses_of_one_customer_share_a_limit(host: str, origin: str) -> None:
    assert origin_of(host) == origin
    with counted_lines("/ipaddress.py") as lines:
        assert origin_of(host) == origin
    assert not lines.count


def test_every_admitted_connection_leaves() -> None:
    arrivals = ConnectionCounts(ConnectionSettings(max_open=2, max_per_address=1))
    assert not arrivals.admit("a")
    assert arrivals.admit("a")
    assert not arrivals.admit("b")
    assert arrivals.admit("c")
    arrivals.leave("a")
    assert not arrivals.admit("c")
    arrivals.leave("b")
    arrivals.leave("c")
    assert not arrivals._open
