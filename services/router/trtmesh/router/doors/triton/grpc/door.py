"""GRPCInferenceService, on the port of the native API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from trtmesh.chassis.errors import (
    InternalError,
    QueueFull,
    SlowClient,
    TrtmeshError,
    UnsupportedCall,
    forget_frames,
)
from trtmesh.chassis.fair.messages import ReceivedMessage
from trtmesh.chassis.forwarding import Sink
from trtmesh.chassis.logs import Occasionally, rebind_request_id, request_id_bound
from trtmesh.chassis.quoting import cut
from trtmesh.chassis.rpc import RpcContext, ServedContext, refuse
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.router.callers.callers import Callers
from trtmesh.router.doors.generation import Caller, ErrorWording, caller_of
from trtmesh.router.doors.triton.answers import Answer, OnlyResponse
from trtmesh.router.doors.triton.calls import MOST_ID_CHARACTERS
from trtmesh.router.doors.triton.grpc.responses import ResponseWriter
from trtmesh.router.doors.triton.server import (
    MODEL_CONTROL,
    SHARED_MEMORY,
    TritonServer,
    unsupported,
)
from trtmesh.router.doors.triton.templates.template import Call

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

SERVICE_NAME = "inference.GRPCInferenceService"
EXTENSIONS = ("model_configuration", "model_repository", "statistics")
MOST_REQUESTS_OF_A_STREAM = 8192
"""Concurrent requests of a stream, as many as `admission.max_items` has by default. More are refused: if they waited,
they would hold up the stops behind them."""

Describe = Callable[[TritonServer, Any], Any]
Serve = Callable[[Call, ReceivedMessage, Caller, Sink[Answer]], Awaitable[None]]
DESCRIPTIONS: Mapping[str, Describe] = {
    "ServerLive": lambda _, __: kserve.ServerLiveResponse(live=True),
    "ServerReady": lambda server, _: kserve.ServerReadyResponse(ready=server.is_ready()),
    "ModelReady": lambda server, request: kserve.ModelReadyResponse(
        ready=server.is_model_ready(request.name, request.version)
    ),
    "ServerMetadata": lambda server, _: server.describe(EXTENSIONS),
    "ModelMetadata": lambda server, request: server.describe_model(request.name, request.version),
    "ModelConfig": lambda server, request: kserve.ModelConfigResponse(
        config=server.configuration(request.name, request.version)
    ),
    "ModelStatistics": lambda server, request: server.statistics(request.name, request.version),
    "RepositoryIndex": lambda server, request: server.repository_index(only_ready=request.ready),
    "TraceSetting": lambda server, request: server.change_trace_settings(request.settings),
    "LogSettings": lambda server, request: server.change_log_settings(request.settings),
}
"""The methods that answer from the state of the server."""

UNSUPPORTED: Mapping[str, str] = {
    "SystemSharedMemoryStatus": SHARED_MEMORY,
    "SystemSharedMemoryRegister": SHARED_MEMORY,
    "SystemSharedMemoryUnregister": SHARED_MEMORY,
    "CudaSharedMemoryStatus": SHARED_MEMORY,
    "CudaSharedMemoryRegister": SHARED_MEMORY,
    "CudaSharedMemoryUnregister": SHARED_MEMORY,
    "RepositoryModelLoad": MODEL_CONTROL,
    "RepositoryModelUnload": MODEL_CONTROL,
}
"""The methods that are refused, with the missing feature."""


class TritonDoor:
    def __init__(self, server: TritonServer, callers: Callers) -> None:
        self._server = server
        self._callers = callers

    def register(self, server: grpc.aio.Server) -> None:
        """Adds all methods of the service."""
        serve: dict[str, Any] = {"ModelInfer": self.infer, "ModelStreamInfer": self.stream_infer}
        serve |= {name: partial(self._describe, method) for name, method in DESCRIPTIONS.items()}
        serve |= {name: partial(self._refuse, feature) for name, feature in UNSUPPORTED.items()}
        methods = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
        handlers = {name: _handler(methods[name], handler) for name, handler in serve.items()}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),)
        )

    async def _describe(self, describe: Describe, request: Any, context: RpcContext) -> Any:
        return describe(self._server, request)

    async def _refuse(self, feature: str, _: Any, context: RpcContext) -> None:
        raise unsupported(feature)

    async def infer(self, request: Any, context: ServedContext) -> bytes:
        """One request, one response."""
        wording = ErrorWording()
        rebind_request_id(request.id)
        try:
            model = self._server.find_model(request.model_name, request.model_version)
            if model.refuses_unary_calls:
                raise UnsupportedCall(
                    "ModelInfer RPC doesn't support models with decoupled transaction policy"
                )
            message = context.message
            with message.admitted():
                caller, response = caller_of(self._callers, context), OnlyResponse()
                with self._server.arriving(message, caller, request.id):
                    call = await self._server.read(message, request, wording, model, unary=True)
                    await self._server.serve(call, message, caller, response)
            assert response.outputs is not None
            return ResponseWriter(model.name, request.id).unary(response.outputs)
        except TrtmeshError as error:
            await refuse(context, error, wording(error))

    async def stream_infer(self, _: AsyncIterator[Any], context: ServedContext) -> None:
        """Runs any number of requests concurrently, until all are over and the client has half-closed."""
        errors_end_it = ("triton_grpc_error", "true") in (context.invocation_metadata() or ())
        stream = _InferStream(self._server, self._callers, context, errors_end_it=errors_end_it)
        try:
            await stream.run()
        except TrtmeshError as error:
            await refuse(context, error, stream.sentence(error))


class _InferStream:
    """One ModelStreamInfer call."""

    def __init__(
        self, server: TritonServer, callers: Callers, context: ServedContext, *, errors_end_it: bool
    ) -> None:
        self._server = server
        self._callers = callers
        self._context = context
        self._errors_end_it = errors_end_it
        self._writing = asyncio.Lock()
        self._cut_off = False
        """Whether a write was cancelled half-way: the stream must end."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        """What ended the stream."""
        self._wording: ErrorWording | None = None
        """The wording of the request that ended the stream."""

    def sentence(self, error: TrtmeshError) -> str:
        return error.message if self._wording is None else self._wording(error)

    async def run(self) -> None:
        """Serves until all requests are over and the client has half-closed, or until a failure ends the stream."""
        context = self._context
        self._reader = asyncio.current_task()
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                if context.half_closed:
                    # The last one needs no task of its own, and its end leaves with the end of the call. All calls
                    # that began in this pass read their requests in the next.
                    await asyncio.sleep(0)
                    await self._serve_one(request, context.message, self._server.serve)
                else:
                    await self._begin(request, context.message)
            if self._tasks:
                await asyncio.wait(self._tasks)
        except asyncio.CancelledError:
            if self._failure is None:
                raise
            raise self._failure from None
        finally:
            self._reader = None
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _begin(self, request: Any, message: ReceivedMessage) -> None:
        """Serves a request beside those that follow. On a full stream it is answered before the next is read, so that
        a client that reads no answers sends no more."""
        if len(self._tasks) >= MOST_REQUESTS_OF_A_STREAM:
            await self._serve_one(request, message, self._stop)
            return
        task = asyncio.create_task(self._serve_one(request, message, self._server.serve))
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        # Its first step counts as time of this call, which then gives way to others.
        await asyncio.sleep(0)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None and self._failure is None and self._reader is not None:
            self._failure = failure
            self._reader.cancel()

    async def _stop(
        self, call: Call, message: ReceivedMessage, caller: Caller, sink: Sink[Answer]
    ) -> None:
        """Serves a stop. Raises QueueFull for all else."""
        if not call.stops:
            most = MOST_REQUESTS_OF_A_STREAM
            raise QueueFull.of(most, f"this stream has {len(self._tasks)} requests")
        await self._server.serve(call, message, caller, sink)

    async def _serve_one(self, request: Any, message: ReceivedMessage, serve: Serve) -> None:
        """Reads a request from its message and has `serve` answer it. Errors become responses; only a slow client ends
        the stream."""
        # A name or an id beyond the limits is refused, and echoed up to them.
        name, own_id = cut(request.model_name), cut(request.id, MOST_ID_CHARACTERS)
        writer, wording = ResponseWriter(name, own_id), ErrorWording()
        parameter = request.parameters.get("triton_enable_empty_final_response")
        with request_id_bound(request.id):
            try:
                with message.admitted():
                    caller = caller_of(self._callers, self._context)
                    responses = _Responses(self, writer, wording, parameter)
                    with self._server.arriving(message, caller, request.id):
                        call = await self._server.read(message, request, wording)
                        await serve(call, message, caller, responses)
            except SlowClient:
                raise
            except TrtmeshError as error:
                await self.write_error(writer, wording, error, final=True)
            except Exception as error:
                # Broad on purpose: a defect must end only the affected request, and visibly.
                log.exception("a request failed unexpectedly")
                defect = InternalError(f"{type(error).__name__}: {error}")
                await self.write_error(writer, wording, defect, final=True)

    async def write_error(
        self, writer: ResponseWriter, wording: ErrorWording, error: TrtmeshError, *, final: bool
    ) -> None:
        sentence = wording(error)
        forget_frames(error)
        occasionally(error.reason, logging.INFO, "request refused: %s: %s", error.reason, sentence)
        if self._errors_end_it or self._cut_off:
            self._wording = wording
            raise error
        await self.write(writer.failed(sentence, final=final))

    def write_now(self, message: bytes) -> bool:
        """Sends a message, and returns whether."""
        is_free = not (self._cut_off or self._writing.locked())
        return is_free and self._context.write_now(message)

    async def write(self, message: bytes) -> None:
        # Concurrent writes are not allowed.
        async with self._writing:
            if self._cut_off:
                raise asyncio.CancelledError
            try:
                await self._context.write(message)
            except asyncio.CancelledError:
                self._cut_off = True
                raise


class _Responses(Sink[Answer]):
    def __init__(
        self, stream: _InferStream, writer: ResponseWriter, wording: ErrorWording, empty_final: Any
    ) -> None:
        """`empty_final` is the parameter that asks for a response at the mere end, or None."""
        self._stream, self._writer, self._wording = stream, writer, wording
        self._empty_final = empty_final is not None and empty_final.bool_param

    def write_now(self, message: Answer) -> bool:
        if message.error is not None:
            return False
        if message.only_end and not self._empty_final:
            return True
        return self._stream.write_now(self._writer.streamed(message.outputs, final=message.final))

    async def write(self, message: Answer) -> None:
        if message.error is not None:
            await self._stream.write_error(
                self._writer, self._wording, message.error, final=message.final
            )
        elif self._empty_final or not message.only_end:
            await self._stream.write(self._writer.streamed(message.outputs, final=message.final))


def _handler(method: Any, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """Returns the handler of a method. Responses of streams are bytes already, of others messages or bytes."""
    make = (
        grpc.stream_stream_rpc_method_handler
        if method.client_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        handler,
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=None if method.client_streaming else _serialise,
    )


def _serialise(response: Any) -> bytes:
    data: bytes = response if isinstance(response, bytes) else response.SerializeToString()
    return data
