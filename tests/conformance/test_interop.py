"""The interop cases of gRPC against our server, by grpc-go's client and by grpcio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from conformance.binaries import GRPC_INTEROP_CLIENT
from conformance.interop_service import (
    ECHO_INITIAL,
    ECHO_TRAILING,
    MESSAGES,
    METHODS,
    MOST_BYTES,
    SERVICE,
    interop_server,
)

CASE_SECONDS = 60.0

CASES = (
    *("empty_unary", "large_unary", "client_streaming", "server_streaming", "ping_pong"),
    *("empty_stream", "timeout_on_sleeping_server", "cancel_after_begin"),
    *("cancel_after_first_response", "status_code_and_message", "special_status_message"),
    *("custom_metadata", "unimplemented_method", "unimplemented_service"),
)

SPECIAL = "\t\ntest with whitespace\r\nand Unicode BMP ☺ and non-BMP \U0001f608\t\n"


@pytest_asyncio.fixture
async def address() -> AsyncIterator[str]:
    async with interop_server() as address:
        yield address


@pytest.mark.slow
@GRPC_INTEROP_CLIENT.needed
@pytest.mark.parametrize("case", CASES)
async def test_grpc_go(address: str, case: str) -> None:
    host, _, port = address.rpartition(":")
    status, output = await GRPC_INTEROP_CLIENT.run(
        *("-use_tls=false", f"-server_host={host}", f"-server_port={port}", f"-test_case={case}"),
        seconds=CASE_SECONDS,
    )
    assert status == 0, output


@pytest_asyncio.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    """grpcio's connection."""
    options = [("grpc.max_receive_message_length", MOST_BYTES)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        yield channel


def _method(channel: grpc.aio.Channel, name: str) -> Any:
    request, response = METHODS[name]
    kinds = {
        "StreamingOutputCall": channel.unary_stream,
        "StreamingInputCall": channel.stream_unary,
        "FullDuplexCall": channel.stream_stream,
    }
    return kinds.get(name, channel.unary_unary)(
        f"/{SERVICE}/{name}",
        request_serializer=MESSAGES[request].SerializeToString,
        response_deserializer=MESSAGES[response].FromString,
    )


def _wanted(*sizes: int, interval_us: int = 0) -> Any:
    parameters = [
        MESSAGES["ResponseParameters"](size=size, interval_us=interval_us) for size in sizes
    ]
    return MESSAGES["StreamingOutputCallRequest"](response_parameters=parameters)


async def test_grpcio_unary(channel: grpc.aio.Channel) -> None:
    empty = MESSAGES["Empty"]()
    assert await _method(channel, "EmptyCall")(empty) == empty
    payload = MESSAGES["Payload"](body=bytes(271_828))
    request = MESSAGES["SimpleRequest"](response_size=314_159, payload=payload)
    response = await _method(channel, "UnaryCall")(request)
    assert len(response.payload.body) == 314_159


async def test_grpcio_streams(channel: grpc.aio.Channel) -> None:
    sizes = [31_415, 9, 2_653, 58_979]
    call = _method(channel, "StreamingOutputCall")(_wanted(*sizes))
    assert [len(each.payload.body) async for each in call] == sizes
    requests = [
        MESSAGES["StreamingInputCallRequest"](payload=MESSAGES["Payload"](body=bytes(size)))
        for size in (27_182, 8, 1_828, 45_904)
    ]
    response = await _method(channel, "StreamingInputCall")(iter(requests))
    assert response.aggregated_payload_size == 74_922
    duplex = _method(channel, "FullDuplexCall")()
    for size in sizes:
        await duplex.write(_wanted(size))
        assert len((await duplex.read()).payload.body) == size
    await duplex.done_writing()
    assert await duplex.read() is grpc.aio.EOF
    assert await duplex.code() is grpc.StatusCode.OK


async def test_grpcio_empty_stream(channel: grpc.aio.Channel) -> None:
    call = _method(channel, "FullDuplexCall")()
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_grpcio_cancels(channel: grpc.aio.Channel) -> None:
    call = _method(channel, "FullDuplexCall")()
    await call.write(_wanted(31_415))
    await call.read()
    call.cancel()
    assert await call.code() is grpc.StatusCode.CANCELLED


async def test_grpcio_deadline(channel: grpc.aio.Channel) -> None:
    call = _method(channel, "StreamingOutputCall")(_wanted(1, interval_us=10**8), timeout=0.05)
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(("code", "details"), [(2, "test status message"), (2, SPECIAL)])
async def test_grpcio_status(channel: grpc.aio.Channel, code: int, details: str) -> None:
    status = MESSAGES["EchoStatus"](code=code, message=details)
    call = _method(channel, "UnaryCall")(MESSAGES["SimpleRequest"](response_status=status))
    assert (await call.code(), await call.details()) == (grpc.StatusCode.UNKNOWN, details)


@pytest.mark.parametrize("method", ["UnaryCall", "FullDuplexCall"])
async def test_grpcio_metadata(channel: grpc.aio.Channel, method: str) -> None:
    sent = ((ECHO_INITIAL, "test_initial_metadata_value"), (ECHO_TRAILING, b"\xab\xab\xab"))
    if method == "UnaryCall":
        call = _method(channel, method)(MESSAGES["SimpleRequest"](), metadata=sent)
        await call
    else:
        call = _method(channel, method)(metadata=sent)
        # Before the end: grpcio has no initial metadata for a call whose status it takes first.
        await call.initial_metadata()
        await call.done_writing()
    assert sent[0] in tuple(await call.initial_metadata())
    assert sent[1] in tuple(await call.trailing_metadata())


@pytest.mark.parametrize("path", [f"/{SERVICE}/None", "/grpc.testing.None/UnimplementedCall"])
async def test_grpcio_unimplemented(channel: grpc.aio.Channel, path: str) -> None:
    method: Any = channel.unary_unary(path)
    call = method(b"")
    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_grpcio_takes_answers_of_60_mib(channel: grpc.aio.Channel) -> None:
    """While another call streams on the same connection."""
    size = 60 * 2**20
    ticks = _method(channel, "StreamingOutputCall")(_wanted(*[1] * 20, interval_us=1000))
    large = _method(channel, "UnaryCall")(MESSAGES["SimpleRequest"](response_size=size))
    response, counted = await asyncio.gather(large, _count(ticks))
    assert (len(response.payload.body), counted) == (size, 20)


async def _count(call: Any) -> int:
    return len([each async for each in call])
