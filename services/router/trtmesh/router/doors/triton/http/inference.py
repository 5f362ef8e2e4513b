"""`infer`, `generate` and `generate_stream`: translated into a ModelInferRequest and served like over gRPC."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus

from aiohttp import hdrs, web
from trtmesh.chassis.errors import SlowClient, TrtmeshError, UnsupportedCall
from trtmesh.chassis.fair.limits import origin_of
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.forwarding import Sink
from trtmesh.chassis.logs import rebind_request_id
from trtmesh.router.doors.generation import Caller
from trtmesh.router.doors.http.answers import EVENT_STREAM, compressed, to_json
from trtmesh.router.doors.http.authorising import IDENTITY
from trtmesh.router.doors.http.bodies import Bodies, Body
from trtmesh.router.doors.http.errors import WORDING, error_headers
from trtmesh.router.doors.http.json_bodies import JSON_COST
from trtmesh.router.doors.triton.answers import Answer, OnlyResponse
from trtmesh.router.doors.triton.http.generate_body import read_generate, write_generate
from trtmesh.router.doors.triton.http.infer_body import (
    HEADER_LENGTH,
    Asked,
    BinaryOutputs,
    json_cost,
    read_infer,
    write_infer,
)
from trtmesh.router.doors.triton.server import TritonServer
from trtmesh.router.doors.triton.templates.template import Call, Model
from trtmesh.router.doors.triton.tensors import Output


@dataclass(frozen=True, slots=True)
class _Read:
    """A call, the received message, and the outputs wanted as binary data."""

    call: Call
    message: ReceivedMessage
    binary: BinaryOutputs


class Inference:
    """The endpoints that run models."""

    def __init__(self, server: TritonServer, bodies: Bodies) -> None:
        self._server = server
        self._bodies = bodies
        self._most_json_bytes = bodies.limits.most_json_bytes

    async def serve(
        self, endpoint: str, request: web.Request, model: Model, binary_type: str
    ) -> web.StreamResponse:
        """Answers at the endpoint `infer`, `generate` or `generate_stream`."""
        if endpoint == "generate":
            return await self.generate(request, model)
        if endpoint == "generate_stream":
            return await self.generate_stream(request, model)
        return await self.infer(request, model, binary_type)

    async def infer(
        self, request: web.Request, model: Model, binary_type: str = ""
    ) -> web.Response:
        """A single response, as JSON and binary tensors. The length of the JSON is in a header of its own or, with
        `binary_type`, at the end of this content type."""
        if model.refuses_unary_calls:
            raise UnsupportedCall(
                "HTTP end point doesn't support models with decoupled transaction policy"
            )
        length, most_json_bytes = _header_length(request, binary_type), self._most_json_bytes
        read = partial(read_infer, model, length, most_json_bytes)
        async with self._admitted(request, model, read, unary=True) as asked:
            outputs = await self._only_response(request, asked)
        call, binary = asked.call, asked.binary
        # Binary outputs are copied as they are.
        told = [output for output in outputs if output.name not in binary]
        write = partial(write_infer, model, call.request_id, outputs, binary)
        data, header_length = await self._bodies.written(json_cost(told), write)
        response = web.Response(body=data, content_type="application/json")
        if header_length is not None and binary_type:
            response.headers[hdrs.CONTENT_TYPE] = f"{binary_type}{header_length}"
        elif header_length is not None:
            response.content_type = "application/octet-stream"
            response.headers[HEADER_LENGTH] = str(header_length)
        return compressed(request, response)

    async def generate(self, request: web.Request, model: Model) -> web.Response:
        """A single response, as plain JSON."""
        read = partial(read_generate, model, self._most_json_bytes)
        unary = not model.refuses_unary_calls
        async with self._admitted(request, model, read, unary=unary) as asked:
            outputs = await self._only_response(request, asked)
        body = await self._written(asked.call, outputs)
        return compressed(request, web.Response(body=body, content_type="application/json"))

    async def generate_stream(self, request: web.Request, model: Model) -> web.StreamResponse:
        """Responses as server-sent events."""
        read = partial(read_generate, model, self._most_json_bytes)
        events = _EventStream(request)
        try:
            async with self._admitted(request, model, read) as asked:
                told = _Events(events, partial(self._written, asked.call))
                await self._server.serve(asked.call, asked.message, _caller_of(request), told)
        except SlowClient:
            raise
        except TrtmeshError as error:
            if not events.begun:
                raise
            await events.fail(error)
        return await events.end()

    def _admitted(
        self,
        request: web.Request,
        model: Model,
        read: Callable[[Body], Asked],
        *,
        unary: bool = False,
    ) -> AbstractAsyncContextManager[_Read]:
        """The block of the call in a body."""

        async def read_body(message: ReceivedMessage, body: Body) -> _Read:
            asked = await message.run(partial(read, body), JSON_COST)
            # A large body was read in another context.
            rebind_request_id(asked.request.id)
            call = await self._server.read(
                message, asked.request, request[WORDING], model, asked.raw, unary=unary
            )
            return _Read(call, message, asked.binary)

        return self._bodies.admitted(request, read_body)

    async def _written(self, call: Call, outputs: Sequence[Output]) -> bytes:
        """A response of `generate` or `generate_stream`."""
        write = partial(write_generate, call.model, call.request_id, outputs)
        return await self._bodies.written(json_cost(outputs), write)

    async def _only_response(self, request: web.Request, asked: _Read) -> Sequence[Output]:
        """The outputs of the only response. Raises TrtmeshError."""
        response = OnlyResponse()
        await self._server.serve(asked.call, asked.message, _caller_of(request), response)
        assert response.outputs is not None
        return response.outputs


class _EventStream:
    """A response of server-sent events. Any row with a response makes the status 200; errors before the first such
    response wait, and without any the first error sets the status."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._errors: list[TrtmeshError] = []

    @property
    def begun(self) -> bool:
        """Whether there is an event."""
        return self._response is not None or bool(self._errors)

    async def send(self, message: bytes) -> None:
        response = await self._begin(HTTPStatus.OK, {})
        await response.write(b"data: " + message + b"\n\n")
        await self._write_errors(response)

    async def fail(self, error: TrtmeshError) -> None:
        self._errors.append(error)
        if self._response is not None:
            await self._write_errors(self._response)

    async def end(self) -> web.StreamResponse:
        if self._errors:
            first = self._errors[0]
            response = await self._begin(first.row.http, error_headers(first))
        else:
            response = await self._begin(HTTPStatus.OK, {})
        await self._write_errors(response)
        await response.write_eof()
        return response

    async def _write_errors(self, response: web.StreamResponse) -> None:
        errors, self._errors = self._errors, []
        for error in errors:
            message = {"error": self._request[WORDING](error)}
            await response.write(b"data: " + to_json(message) + b"\n\n")

    async def _begin(self, status: int, headers: dict[str, str]) -> web.StreamResponse:
        if self._response is None:
            headers |= {hdrs.CONTENT_TYPE: EVENT_STREAM, hdrs.CACHE_CONTROL: "no-cache"}
            response = web.StreamResponse(status=status, headers=headers)
            await response.prepare(self._request)
            self._response = response
        return self._response


class _Events(Sink[Answer]):
    def __init__(
        self, stream: _EventStream, written: Callable[[Sequence[Output]], Awaitable[bytes]]
    ) -> None:
        self._stream, self._written = stream, written

    def write_now(self, message: Answer) -> bool:
        return False

    async def write(self, message: Answer) -> None:
        if message.error is not None:
            await self._stream.fail(message.error)
        elif not message.only_end:
            await self._stream.send(await self._written(message.outputs))


def _header_length(request: web.Request, binary_type: str) -> str | None:
    """Length of the JSON in a body with binary data; None without."""
    if not binary_type:
        return request.headers.get(HEADER_LENGTH)
    content_type = request.headers.get(hdrs.CONTENT_TYPE, "")
    if not content_type.startswith(binary_type):
        return None
    return content_type.removeprefix(binary_type)


def _caller_of(request: web.Request) -> Caller:
    origin = origin_of(request.remote or "")
    return Caller(request[IDENTITY], None, origin, request.headers.items())
