"""Messages that a handler writes in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from chassis.grpc.server.conftest import MOST_BYTES, Example, serving
from chassis.grpc.server.wire import message, wired
from trtmesh.chassis.http2.frames import INITIAL_WINDOW_SIZE, FrameType, Setting, window_update
from trtmesh.chassis.http2.writer import MAX_BULK_DATA_SIZE

BODY = bytes(range(256)) * 2**13
"""2 MiB."""


@asynccontextmanager
async def pieces(*sizes: int) -> AsyncIterator[Example]:
    """An example whose method Many writes BODY in pieces, the last of them with the rest."""

    async def many(request: bytes, context: Any) -> None:
        del request
        view, at = memoryview(BODY), 0
        cut = []
        for size in sizes:
            cut.append(view[at : at + size])
            at += size
        await context.write_pieces(*cut, view[at:])
        await context.write(b"end")

    changed: Any = Example()
    changed.many = many
    async with serving(changed) as example:
        yield example


@pytest.mark.parametrize("sizes", [(), (7,), (0, 2**16, 1, 2**20)])
async def test_other_clients_read_one_message(sizes: tuple[int, ...]) -> None:
    limits = [("grpc.max_receive_message_length", MOST_BYTES)]
    async with (
        pieces(*sizes) as example,
        grpc.aio.insecure_channel(example.address, options=limits) as channel,
    ):
        stream: Any = channel.unary_stream("/example.Service/Many")
        assert [each async for each in stream(b"")] == [BODY, b"end"]


@pytest.mark.parametrize(
    ("admitted", "largest"),
    [(2**14, 2**14), (2**18, 2**18), (2**24 - 1, MAX_BULK_DATA_SIZE)],
)
async def test_frames_are_as_large_as_the_client_admits(admitted: int, largest: int) -> None:
    limits = {Setting.INITIAL_WINDOW_SIZE: 2**24, Setting.MAX_FRAME_SIZE: admitted}
    async with pieces(9) as example, wired(example, limits) as wire:
        wire.send(window_update(0, 2**24 - INITIAL_WINDOW_SIZE))
        wire.send(wire.call(1, "Many"), wire.data(1, b""))
        found: list[bytes] = []
        while len(b"".join(found)) < len(message(BODY)) + len(message(b"end")):
            found.append((await wire.next(FrameType.DATA)).payload)
        assert b"".join(found) == message(BODY) + message(b"end")
        assert max(map(len, found)) == largest


async def test_pieces_stay_within_the_window() -> None:
    async with pieces(9) as example, wired(example, {Setting.INITIAL_WINDOW_SIZE: 10}) as wire:
        wire.send(wire.call(1, "Many"), wire.data(1, b""))
        assert (await wire.next(FrameType.DATA)).payload == message(BODY)[:10]
        wire.send(window_update(1, 5))
        assert (await wire.next(FrameType.DATA)).payload == message(BODY)[10:15]


async def test_message_over_the_limit_is_refused() -> None:
    async with pieces() as example:
        example.server.clients.policy = replace(
            example.server.clients.policy, max_message_bytes=1000
        )
        async with wired(example) as wire:
            wire.send(wire.call(1, "Many"), wire.data(1, b""))
            async with asyncio.timeout(60):
                _, said = await wire.answer(1)
            assert said["grpc-status"] == str(grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
