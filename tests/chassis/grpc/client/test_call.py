"""Calls of the client to our server and to grpc.aio's."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from chassis.grpc.client.conftest import FAILED_HANDSHAKES
from chassis.grpc.client.scripted_server import PATIENCE_SECONDS, Peer, method
from chassis.grpc.server.conftest import MOST_BYTES, Example
from trtmesh.chassis.errors import Unavailable
from trtmesh.chassis.grpc.client import ClientConnection, Method, connected


async def ask(connection: ClientConnection, name: str, text: bytes) -> bytes:
    return await connection.ask(method(name), text, PATIENCE_SECONDS)


@pytest.mark.parametrize("size", [0, 1, 16_000, 70_000, 5 * 2**20])
async def test_unary_call(connection: ClientConnection, size: int) -> None:
    text = bytes(range(251)) * (size // 251 + 1)
    assert await ask(connection, "Echo", text[:size]) == text[:size]


async def test_concurrent_calls(connection: ClientConnection) -> None:
    texts = [b"%d" % number * 1000 for number in range(100)]
    assert await asyncio.gather(*(ask(connection, "Echo", text) for text in texts)) == texts


async def test_read_raises_the_status(connection: ClientConnection) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(connection, "Fail", "für nichts: 100 %\n".encode())
    error = caught.value
    assert (error.code(), error.details()) == (grpc.StatusCode.DATA_LOSS, "für nichts: 100 %\n")
    told = dict(error.trailing_metadata())
    assert (told["reason"], told["data-bin"]) == ("OWN", b"\x00\xff")


async def test_unknown_method_is_unimplemented(connection: ClientConnection) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(connection, "None", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_messages_alternate_on_a_stream(connection: ClientConnection) -> None:
    call = connection.open(method("Chat"))
    for number in range(500):
        await call.write(b"message %d" % number)
        assert await call.read() == (b"message %d" % number)[::-1]
    call.half_close()
    assert await call.read() is None


async def test_messages_are_written_ahead(connection: ClientConnection) -> None:
    call = connection.open(method("Join"))
    for number in range(50):
        await call.write(bytes((number,)) * 50_000)
    call.half_close()
    joined = await call.read()
    assert joined == b"".join(bytes((number,)) * 50_000 for number in range(50))
    assert await call.read() is None


async def test_messages_beyond_the_window_arrive_in_order(connection: ClientConnection) -> None:
    call = connection.open(method("Many"))
    await call.write(b"300,100000")
    call.half_close()
    received = [message async for message in call]
    assert received == [bytes((number % 251,)) * 100_000 for number in range(300)]


@pytest.mark.parametrize("size", [0, 10, 3_000, 100_000])
async def test_each_message_is_passed_on_in_order(connection: ClientConnection, size: int) -> None:
    call = connection.open(method("Many"))
    await call.write(b"300,%d" % size)
    call.half_close()
    received = list[bytes]()
    await call.each(lambda message: received.append(bytes(message)))
    assert received == [bytes((number % 251,)) * size for number in range(300)]


async def test_error_of_a_receiver_is_raised(connection: ClientConnection) -> None:
    call, received = connection.open(method("Chat")), list[bytes]()

    def receive(message: bytes) -> None:
        received.append(message)
        if len(received) == 3:
            raise ZeroDivisionError("enough")

    reading = asyncio.create_task(call.each(receive))
    while not reading.done():
        await call.write(b"message")
        await asyncio.sleep(0.001)
    with pytest.raises(ZeroDivisionError, match="enough"):
        await reading
    call.cancel()
    assert len(received) == 3


async def test_cancel_ends_the_handler(connection: ClientConnection, example: Example) -> None:
    call = connection.open(method("Wait"))
    await call.write(b"")
    await example.waiting.wait()
    call.cancel()
    await asyncio.wait_for(example.cancelled.wait(), PATIENCE_SECONDS)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_closing_the_connection_ends_its_calls(example: Example) -> None:
    async with connected(example.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
        call = connection.open(method("Wait"))
        await call.write(b"")
        await example.waiting.wait()
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
    await asyncio.wait_for(example.cancelled.wait(), PATIENCE_SECONDS)
    with pytest.raises(grpc.aio.AioRpcError, match="connection was closed"):
        await reading
    with pytest.raises(Unavailable, match="connection was closed"):
        connection.open(method("Echo"))


async def test_ask_times_out(connection: ClientConnection) -> None:
    with pytest.raises((Unavailable, grpc.aio.AioRpcError), match=r"did not respond|Deadline"):
        await connection.ask(method("Wait"), b"", 0.2)
    assert await ask(connection, "Echo", b"still here") == b"still here"


async def test_write_to_an_ended_call_raises_its_status(connection: ClientConnection) -> None:
    for text, error, words in (
        (b"reason", grpc.aio.AioRpcError, "reason"),
        (b"", Unavailable, "the stream ended"),
    ):
        name = "Fail" if text else "First"
        call = connection.open(method(name))
        await call.write(text)
        if text:
            with pytest.raises(error, match=words):
                await call.read()
        else:
            assert await call.read() == b""
            assert await call.read() is None
        with pytest.raises(error, match=words):
            await call.write(b"late")


async def test_waiting_write_raises_the_status(
    connection: ClientConnection, example: Example
) -> None:
    call = connection.open(method("Ignore"))

    async def write() -> None:
        while True:
            await call.write(bytes(2 * 2**20))

    writing = asyncio.create_task(write())
    await example.waiting.wait()
    await wait_until_processed(connection)
    call.cancel()
    with pytest.raises(grpc.aio.AioRpcError):
        await writing


async def wait_until_processed(connection: ClientConnection) -> None:
    """Returns when the server has processed everything sent before."""
    for _ in range(5):
        await ask(connection, "Echo", b"")


async def test_messages_beyond_the_limit_are_refused(example: Example) -> None:
    async with connected(example.address, 1000, PATIENCE_SECONDS) as connection:
        with pytest.raises(grpc.aio.AioRpcError, match="1001 bytes"):
            await ask(connection, "Echo", bytes(1001))
        with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
            await ask(connection, "Many", b"1,1001")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await ask(connection, "Many", b"1,1000") == bytes(1000)


async def test_unparsable_message_is_refused(connection: ClientConnection) -> None:
    def refuse(data: bytes) -> bytes:
        raise ValueError("no such thing")

    broken = Method("/example.Service/Echo", bytes, refuse)
    with pytest.raises(grpc.aio.AioRpcError, match="no such thing"):
        await connection.ask(broken, b"", PATIENCE_SECONDS)
    assert await ask(connection, "Echo", b"still here") == b"still here"


async def test_stopping_server_ends_open_calls(
    connection: ClientConnection, example: Example
) -> None:
    call = connection.open(method("Wait"))
    await call.write(b"")
    await example.waiting.wait()
    await example.server.stop(grace=None)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    with pytest.raises(Unavailable):
        connection.open(method("Echo"))


async def test_compressed_responses_are_read() -> None:
    server = grpc.aio.server(compression=grpc.Compression.Gzip)
    text = b"again and " * 1000

    async def answer(request: bytes, context: object) -> bytes:
        return text

    handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("example.Service", handlers),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with connected(f"127.0.0.1:{port}", MOST_BYTES, PATIENCE_SECONDS) as connection:
            assert await ask(connection, "Echo", b"") == text
    finally:
        await server.stop(grace=None)


async def test_connection_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(Unavailable, match=f"cannot connect to {address}: Connection refused"):
            async with connected(address, MOST_BYTES, PATIENCE_SECONDS):
                pass


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:x", f"{'a' * 64}.example:1"])
async def test_invalid_address(address: str) -> None:
    with pytest.raises(Unavailable, match="cannot connect to"):
        async with connected(address, MOST_BYTES, PATIENCE_SECONDS):
            pass


@pytest.mark.parametrize(
    ("peer", "words"), FAILED_HANDSHAKES.values(), ids=FAILED_HANDSHAKES, indirect=["peer"]
)
async def test_handshake_fails_without_a_grpc_server(peer: Peer, words: str) -> None:
    with pytest.raises(Unavailable, match=words):
        async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS):
            pass


@pytest.mark.parametrize("peer", [b""], indirect=True)
async def test_handshake_times_out(peer: Peer) -> None:
    with pytest.raises(Unavailable, match="sent no SETTINGS"):
        async with connected(peer.address, MOST_BYTES, 0.3):
            pass


async def test_server_closes_at_once(peer: Peer) -> None:
    peer.closed.set()
    async with asyncio.timeout(PATIENCE_SECONDS):
        with pytest.raises((Unavailable, grpc.aio.AioRpcError), match=r"clos|reset by peer"):
            async with connected(peer.address, MOST_BYTES, PATIENCE_SECONDS) as connection:
                await ask(connection, "Echo", b"")
