"""`grpc.testing.TestService`, which gRPC's interop clients call, on our server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from trtmesh.chassis.grpc.server import GrpcServer

SERVICE = "grpc.testing.TestService"
ECHO_INITIAL, ECHO_TRAILING = "x-grpc-test-echo-initial", "x-grpc-test-echo-trailing-bin"
MOST_BYTES = 64 * 2**20


def _messages() -> dict[str, Any]:
    """Message classes by name, in a pool of their own."""
    folder = Path(__file__).parent
    with tempfile.NamedTemporaryFile() as described:
        arguments = [f"-I{folder}", f"--descriptor_set_out={described.name}", "testing.proto"]
        # In a process of its own: after protoc's library, the one of NIXL crashes as it is loaded.
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
        files = descriptor_pb2.FileDescriptorSet.FromString(described.read())
    found = message_factory.GetMessages(files.file, descriptor_pool.DescriptorPool())
    return {name.rpartition(".")[2]: kind for name, kind in found.items()}


MESSAGES = _messages()

METHODS = {
    "EmptyCall": ("Empty", "Empty"),
    "UnaryCall": ("SimpleRequest", "SimpleResponse"),
    "StreamingOutputCall": ("StreamingOutputCallRequest", "StreamingOutputCallResponse"),
    "StreamingInputCall": ("StreamingInputCallRequest", "StreamingInputCallResponse"),
    "FullDuplexCall": ("StreamingOutputCallRequest", "StreamingOutputCallResponse"),
}
"""Request and response of each method."""


class TestService:
    """The handlers."""

    __test__ = False

    async def empty_call(self, request: Any, context: Any) -> Any:
        return request

    async def unary_call(self, request: Any, context: Any) -> Any:
        await _echo_metadata(context)
        await _end_as_asked(request, context)
        return MESSAGES["SimpleResponse"](payload=_payload(request.response_size))

    async def streaming_output_call(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for wanted in request.response_parameters:
            await asyncio.sleep(wanted.interval_us / 1e6)
            yield MESSAGES["StreamingOutputCallResponse"](payload=_payload(wanted.size))

    async def streaming_input_call(self, requests: AsyncIterator[Any], context: Any) -> Any:
        size = 0
        async for request in requests:
            size += len(request.payload.body)
        return MESSAGES["StreamingInputCallResponse"](aggregated_payload_size=size)

    async def full_duplex_call(
        self, requests: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        await _echo_metadata(context)
        async for request in requests:
            await _end_as_asked(request, context)
            async for response in self.streaming_output_call(request, context):
                yield response


async def _echo_metadata(context: Any) -> None:
    given = dict(context.invocation_metadata())
    if ECHO_INITIAL in given:
        await context.send_initial_metadata(((ECHO_INITIAL, given[ECHO_INITIAL]),))
    if ECHO_TRAILING in given:
        context.set_trailing_metadata(((ECHO_TRAILING, given[ECHO_TRAILING]),))


async def _end_as_asked(request: Any, context: Any) -> None:
    asked = request.response_status
    if asked.code:
        codes = {code.value[0]: code for code in grpc.StatusCode}
        await context.abort(codes[asked.code], asked.message)


def _payload(size: int) -> Any:
    return MESSAGES["Payload"](body=bytes(size))


@asynccontextmanager
async def interop_server() -> AsyncIterator[str]:
    """Serves on a free port; yields the address."""
    service = TestService()
    made = {
        "EmptyCall": (grpc.unary_unary_rpc_method_handler, service.empty_call),
        "UnaryCall": (grpc.unary_unary_rpc_method_handler, service.unary_call),
        "StreamingOutputCall": (
            grpc.unary_stream_rpc_method_handler,
            service.streaming_output_call,
        ),
        "StreamingInputCall": (grpc.stream_unary_rpc_method_handler, service.streaming_input_call),
        "FullDuplexCall": (grpc.stream_stream_rpc_method_handler, service.full_duplex_call),
    }
    handlers = {}
    for name, (handler, function) in made.items():
        request, response = METHODS[name]
        handlers[name] = handler(
            function, MESSAGES[request].FromString, MESSAGES[response].SerializeToString
        )
    server = GrpcServer(MOST_BYTES)
    server.add_registered_method_handlers(SERVICE, handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(grace=None)
