"""Transports that are open when an event loop ends, and late sockets."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import ExitStack, suppress

import pytest
from tested_loop import Loop, delay_sockets

PATIENCE_SECONDS = 60.0


@pytest.mark.parametrize("passes", range(6))
async def test_a_server_closes_what_it_accepts_last(passes: int) -> None:
    """It closes some passes of the event loop after the system has connected a client."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.setblocking(False)
        for _ in range(passes):
            await asyncio.sleep(0)
        server.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            # The system resets what was not accepted.
            with suppress(ConnectionResetError):
                assert not await asyncio.get_running_loop().sock_recv(client, 1)


async def _leave_open(kept: list[asyncio.StreamWriter]) -> None:
    server = await asyncio.start_server(lambda *pair: kept.append(pair[1]), "127.0.0.1", 0)
    _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    kept.append(writer)
    while len(kept) < 2:  # noqa: ASYNC110 - accepting sets no event
        await asyncio.sleep(0.01)
    server.close()


def test_a_transport_left_open_is_told_of_at_the_end_of_its_loop() -> None:
    kept: list[asyncio.StreamWriter] = []
    with pytest.raises(
        ResourceWarning, match=r"left open: <_SelectorSocketTransport .*StreamReaderProtocol"
    ):
        asyncio.run(_leave_open(kept))
    # Nothing is left for the collector to warn of.
    assert [repr(each.transport).split()[1] for each in kept] == ["closed", "closed"]


async def _order() -> tuple[int, ...]:
    """The order in which two sockets are read that became ready together."""
    loop, read = asyncio.get_running_loop(), asyncio.Queue[int]()

    def take(number: int, far: socket.socket) -> None:
        far.recv(1)
        read.put_nowait(number)

    with ExitStack() as stack:
        for number in range(2):
            near, far = map(stack.enter_context, socket.socketpair())
            loop.add_reader(far, take, number, far)
            stack.callback(loop.remove_reader, far)
            near.send(b"x")
        return await read.get(), await read.get()


def test_late_sockets_are_read_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "_process_events", Loop._process_events)
    delay_sockets(random.Random(1))
    assert {asyncio.run(_order()) for _ in range(20)} == {(0, 1), (1, 0)}
