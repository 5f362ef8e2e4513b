"""Calls that the guard refuses have no handler, and are rated."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from chassis.grpc.server.conftest import GUEST, Example
from chassis.grpc.server.wire import wired
from trtmesh.chassis.fair.limits import Rate
from trtmesh.chassis.grpc.server import refusals
from trtmesh.chassis.http2 import rates
from trtmesh.chassis.http2.frames import END_STREAM, ErrorCode, rst_stream


@pytest.mark.parametrize("kind", ["unary_unary", "stream_stream"])
async def test_clients_learn_status_and_metadata(example: Example, kind: str) -> None:
    async with grpc.aio.insecure_channel(example.address) as channel:
        call: Any = getattr(channel, kind)("/example.Service/Echo")
        # grpcio's streaming calls may lose the status of a call that ends while they write.
        given = (b"x",) if kind == "unary_unary" else ()
        made = call(*given, metadata=tuple(GUEST.items()))
        assert (await made.code(), await made.details()) == (
            grpc.StatusCode.UNAUTHENTICATED,
            "no guests",
        )
        assert ("why", "a guest") in tuple(await made.trailing_metadata())


async def test_a_refused_call_ends_when_its_message_begins(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "FIRST_MESSAGE_SECONDS", 3600.0)
    async with wired(example) as wire:
        wire.send(wire.call(1, "Echo", END_STREAM, changes=GUEST))
        assert (await wire.answer(1))[1]["grpc-status"] == "16"
        wire.send(wire.call(3, changes=GUEST), wire.data(3, b"whole"))
        assert (await wire.answer(3))[1]["grpc-status"] == "16"
        wire.send(wire.call(5, changes=GUEST))
        wire.send(wire.data(5, b"more follows", 0))
        assert (await wire.answer(5))[1]["grpc-status"] == "16"
        assert await wire.error() == (5, ErrorCode.NO_ERROR)
        wire.send(wire.data(5, b"on its way"))
        await wire.echoes(7)
    assert len(example.contexts) == 1


async def test_a_refused_call_ends_soon_without_a_message(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "FIRST_MESSAGE_SECONDS", 0.0)
    async with wired(example) as wire:
        wire.send(wire.call(1, "Chat", changes=GUEST))
        assert (await wire.answer(1))[1]["grpc-status"] == "16"


@pytest.mark.parametrize("reset", [False, True])
async def test_refused_calls_are_rated(
    example: Example, monkeypatch: pytest.MonkeyPatch, *, reset: bool
) -> None:
    """Also of a client that waits for no answer. Nothing runs for them."""
    monkeypatch.setattr(rates, "REFUSED_CALL", Rate("refused calls", 20, 0.001))
    async with wired(example) as wire, wired(example) as other:
        tasks = len(asyncio.all_tasks())
        for stream in range(1, 41, 2):
            end = rst_stream(stream, ErrorCode.CANCEL) if reset else wire.data(stream, b"")
            wire.send(wire.call(stream, changes=GUEST), end)
        if not reset:
            for stream in range(1, 41, 2):
                assert (await wire.answer(stream))[1]["grpc-status"] == "16"
        assert len(asyncio.all_tasks()) == tasks
        wire.send(wire.call(41, changes=GUEST))
        assert await wire.error() == (0, ErrorCode.ENHANCE_YOUR_CALM)
        await wire.closed()
        await other.echoes(1)
