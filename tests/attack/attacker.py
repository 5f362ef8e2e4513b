"""An attacker's connections: send as fast as the router reads, and connect again after each end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from attack.frames import Attack
from trtmesh.chassis.http2.frames import (
    ACK,
    FRAME_HEADER,
    PREFACE,
    ErrorCode,
    FrameType,
    frame,
    settings,
)

RECONNECT_SECONDS = 0.01
ADDRESS = "127.0.0.2"
"""Of the attacker: healthy clients have another."""
CONNECTS_AT_ONCE = 50


@dataclass
class Toll:
    """What the connections met."""

    sent: int = 0
    """Bytes."""
    goaways: int = 0
    told: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by a GOAWAY with ENHANCE_YOUR_CALM."""
    ends: int = 0
    """Connections ended by the router."""


@dataclass(frozen=True)
class Door:
    """A port, and how one talks to it."""

    address: str
    opening: bytes
    """What a client sends first."""
    read: Callable[[asyncio.StreamReader, Toll], Awaitable[None]]
    """Reads everything, until the end."""


def grpc_door(address: str) -> Door:
    opening = PREFACE + settings({}) + frame(FrameType.SETTINGS, ACK, 0)
    return Door(address, opening, _read_frames)


def http_door(address: str) -> Door:
    return Door(address, b"", _read_anything)


async def flood(
    door: Door, attack: Attack, connections: int, seconds: float, patience: float = 0.0
) -> Toll:
    """Attacks from `connections` connections for `seconds`, and for `patience` more until one is told to calm down."""
    toll = Toll()
    entrance = asyncio.Semaphore(CONNECTS_AT_ONCE)
    tasks = [
        asyncio.create_task(_flood_again(door, attack, toll, entrance)) for _ in range(connections)
    ]
    try:
        await asyncio.sleep(seconds)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await toll.told.wait()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return toll


async def _flood_again(door: Door, attack: Attack, toll: Toll, entrance: asyncio.Semaphore) -> None:
    host, _, port = door.address.rpartition(":")
    while True:
        try:
            async with entrance:
                reader, writer = await asyncio.open_connection(
                    host, int(port), local_addr=(ADDRESS, 0)
                )
        except OSError:
            await asyncio.sleep(RECONNECT_SECONDS)
            continue
        reading = asyncio.ensure_future(door.read(reader, toll))
        try:
            writer.write(door.opening)
            await _send(writer, attack(), toll, reading)
        except OSError:
            toll.ends += 1
        finally:
            reading.cancel()
            writer.transport.abort()
            await asyncio.gather(reading, return_exceptions=True)
        await asyncio.sleep(RECONNECT_SECONDS)


async def _send(
    writer: asyncio.StreamWriter,
    pieces: Iterator[bytes | float],
    toll: Toll,
    reading: asyncio.Future[None],
) -> None:
    for piece in pieces:
        if reading.done():
            toll.ends += 1
            return
        if isinstance(piece, float):
            await asyncio.sleep(piece)
            continue
        writer.write(piece)
        toll.sent += len(piece)
        await writer.drain()
        await asyncio.sleep(0)


async def _read_anything(reader: asyncio.StreamReader, toll: Toll) -> None:
    with suppress(OSError):
        while await reader.read(2**16):
            pass


async def _read_frames(reader: asyncio.StreamReader, toll: Toll) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readexactly(FRAME_HEADER.size)
            length_and_type, _, _ = FRAME_HEADER.unpack(head)
            payload = await reader.readexactly(length_and_type >> 8)
            if length_and_type & 0xFF == FrameType.GOAWAY:
                toll.goaways += 1
                if ErrorCode.parse(payload[4:8]) == ErrorCode.ENHANCE_YOUR_CALM:
                    toll.told.set()
