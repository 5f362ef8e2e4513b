"""Servers of each protocol that answer by script: a time for every chunk, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc
from aiohttp import web
from cli.bench.virtual import Travelling
from trtmesh.chassis.error_wire import to_metadata, to_proto
from trtmesh.chassis.errors import BackendFailed, QueueFull, RateLimited
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.kserve import model_config_pb2
from trtmesh.tools.bench.targets.target import Url
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2, router_pb2_grpc


class Fault(Enum):
    """What a server does behind the last chunk of a script, in place of the end."""

    NONE = auto()
    ERROR = auto()
    """Says that the request failed."""
    BREAK = auto()
    """Breaks the connection or the call."""
    NO_END = auto()
    """Ends the stream in good order, without the end of the item."""
    HANG = auto()
    REFUSE = auto()
    """Before everything: the queue is full."""
    LIMIT = auto()
    """Before everything: this caller asks too often."""
    CANCELLED = auto()
    """Says that somebody cancelled the request."""
    NONSENSE = auto()
    """Sends what is no part of the protocol."""
    TOO_MUCH = auto()
    """Sends the last chunk again behind the end."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens at a time after the request came."""

    at_s: float
    text: str
    ids: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Script:
    """An answer."""

    chunks: Sequence[Chunk]
    ends_s: float
    fault: Fault = Fault.NONE
    told_tokens: int | None = None
    """Tokens that usage tells, if it lies."""

    @property
    def tokens(self) -> int:
        own = sum(len(chunk.ids) for chunk in self.chunks)
        return own if self.told_tokens is None else self.told_tokens


Scripts = Callable[[str], Script]
"""The answer to a prompt."""


class Play:
    """Plays scripts in the time of the loop, and counts what travels."""

    def __init__(self, scripts: Scripts, travelling: Travelling) -> None:
        self._scripts = scripts
        self._travelling = travelling

    def script(self, prompt: str) -> Script:
        return self._scripts(prompt)

    def sends(self, prompt: str) -> None:
        """A message beside the chunks."""
        self._travelling.add(prompt)

    async def chunks(self, prompt: str, script: Script) -> AsyncIterator[Chunk]:
        """Each chunk at its time; then waits for the end. Time stands still unless the server waits here: the request
        is under way until then, and the end until the client has returned."""
        began = asyncio.get_running_loop().time()
        for chunk in script.chunks:
            await self._wait(prompt, began + chunk.at_s)
            self._travelling.add(prompt)
            yield chunk
        await self._wait(prompt, None if script.fault is Fault.HANG else began + script.ends_s)

    async def _wait(self, prompt: str, until: float | None) -> None:
        self._travelling.add(prompt, -1)
        if until is None:
            await asyncio.Event().wait()
        else:
            await asyncio.sleep(until - asyncio.get_running_loop().time())
        self._travelling.add(prompt)


class NativeServer(router_pb2_grpc.MeshServiceServicer):
    """MeshService.Generate, one item a request."""

    def __init__(self, play: Play) -> None:
        self._play = play

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        prompt = request.items[0].prompt.text
        script = self._play.script(prompt)
        if script.fault is Fault.REFUSE:
            error = QueueFull("Exceeds maximum queue size")
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error), to_metadata(error))
        if script.fault is Fault.LIMIT:
            limit = RateLimited("too often")
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too often", to_metadata(limit))
        yield _event(accepted=router_pb2.RequestAccepted(request_id=request.request_id))
        yield _event(item_started=router_pb2.ItemStarted(prompt_tokens=3, worker="engine-0"))
        async for chunk in self._play.chunks(prompt, script):
            yield _event(tokens=_tokens(chunk))
        usage = pb.Usage(prompt_tokens=3, generated_tokens=script.tokens)
        if script.fault is Fault.ERROR:
            failed = router_pb2.ItemFailed(
                error=to_proto(BackendFailed("out of luck")), usage=usage
            )
            yield _event(item_failed=failed)
        elif script.fault is Fault.BREAK:
            await context.abort(grpc.StatusCode.INTERNAL, "broken")
        elif script.fault is Fault.NONSENSE:
            yield _event(batch_index=7, tokens=_tokens(chunk))
        elif script.fault in (Fault.NONE, Fault.CANCELLED, Fault.TOO_MUCH):
            is_over = script.fault is Fault.CANCELLED
            reason = pb.FINISH_REASON_CANCELLED if is_over else pb.FINISH_REASON_LENGTH
            yield _event(item_finished=router_pb2.ItemFinished(reason=reason, usage=usage))
            if script.fault is Fault.TOO_MUCH:
                yield _event(tokens=_tokens(chunk))

    async def Stop(self, request: Any, context: Any) -> Any:
        return router_pb2.StopResponse()

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no resuming")
        yield


def _tokens(chunk: Chunk) -> router_pb2.TokensGenerated:
    return router_pb2.TokensGenerated(
        token_offset=chunk.offset, token_ids=chunk.ids, text=chunk.text
    )


def _event(**event: Any) -> router_pb2.GenerateResponse:
    return router_pb2.GenerateResponse(events=[router_pb2.GenerateEvent(**event)])


class KserveServer:
    """A decoupled `ensemble` with counts of tokens."""

    INPUTS: Mapping[str, Any] = {
        "text_input": model_config_pb2.TYPE_STRING,
        "max_tokens": model_config_pb2.TYPE_INT32,
        "stream": model_config_pb2.TYPE_BOOL,
        "return_num_output_tokens": model_config_pb2.TYPE_BOOL,
    }

    def __init__(self, play: Play) -> None:
        self._play = play

    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            "inference.GRPCInferenceService",
            {
                "ModelConfig": grpc.unary_unary_rpc_method_handler(
                    self.config,
                    kserve.ModelConfigRequest.FromString,
                    kserve.ModelConfigResponse.SerializeToString,
                ),
                "ServerMetadata": grpc.unary_unary_rpc_method_handler(
                    self.metadata,
                    kserve.ServerMetadataRequest.FromString,
                    kserve.ServerMetadataResponse.SerializeToString,
                ),
                "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
                    self.stream,
                    kserve.ModelInferRequest.FromString,
                    kserve.ModelStreamInferResponse.SerializeToString,
                ),
            },
        )

    async def config(self, request: Any, context: Any) -> Any:
        config = model_config_pb2.ModelConfig(name="ensemble", max_batch_size=8)
        config.model_transaction_policy.decoupled = True
        for name, kind in self.INPUTS.items():
            config.input.add(name=name, data_type=kind, dims=[1], optional=name != "text_input")
        return kserve.ModelConfigResponse(config=config)

    async def metadata(self, request: Any, context: Any) -> Any:
        return kserve.ServerMetadataResponse(name="scripted", version="1")

    async def stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            raw = request.raw_input_contents
            texts = [r for i, r in zip(request.inputs, raw, strict=True) if i.name == "text_input"]
            prompt = texts[0][4:].decode()
            script = self._play.script(prompt)
            if script.fault is Fault.REFUSE:
                yield kserve.ModelStreamInferResponse(
                    error_message="Exceeds maximum queue size of 8 for model 'ensemble'"
                )
                return
            if script.fault is Fault.LIMIT:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too often")
            async for chunk in self._play.chunks(prompt, script):
                yield self._response(chunk)
            if script.fault is Fault.ERROR:
                yield kserve.ModelStreamInferResponse(error_message="out of luck")
            elif script.fault is Fault.BREAK:
                await context.abort(grpc.StatusCode.INTERNAL, "broken")
            elif script.fault is Fault.NONSENSE:
                cut = self._response(chunk)
                cut.infer_response.raw_output_contents[0] = b"\x05"
                yield cut
            elif script.fault in (Fault.NONE, Fault.TOO_MUCH):
                last = kserve.ModelStreamInferResponse()
                last.infer_response.parameters["triton_final_response"].bool_param = True
                yield last
                if script.fault is Fault.TOO_MUCH:
                    yield self._response(chunk)

    @staticmethod
    def _response(chunk: Chunk) -> Any:
        message = kserve.ModelStreamInferResponse()
        text = chunk.text.encode()
        for name, kind, data in (
            ("text_output", "BYTES", struct.pack("<I", len(text)) + text),
            ("num_output_tokens", "INT32", struct.pack("<i", chunk.offset + len(chunk.ids))),
        ):
            message.infer_response.outputs.add(name=name, datatype=kind, shape=[1])
            message.infer_response.raw_output_contents.append(data)
        return message


class HttpServer:
    """generate_stream, and OpenAI's completions and chats."""

    def __init__(self, play: Play) -> None:
        self._play = play

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v2/models/ensemble/generate_stream", self.generate)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.about)
        app.router.add_get("/v2", self.about)
        return app

    async def about(self, request: web.Request) -> web.Response:
        return web.json_response({"name": "scripted", "version": "1"})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()

        def message(chunk: Chunk) -> Mapping[str, Any]:
            return {"text_output": chunk.text, "num_output_tokens": chunk.offset + len(chunk.ids)}

        return await self._answer(request, body["text_input"], message, ())

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        is_chat = "messages" in body
        prompt = str(body["messages"][-1]["content"] if is_chat else body["prompt"])
        script_tokens = 0

        kind = "chat.completion.chunk" if is_chat else "text_completion"
        common = {"id": "1", "object": kind, "created": 1, "model": "demo"}

        def choice(content: Mapping[str, Any], reason: str | None = None) -> Mapping[str, Any]:
            own = {"delta": content} if is_chat else {"text": content["content"]}
            return {**common, "choices": [{"index": 0, **own, "finish_reason": reason}]}

        def message(chunk: Chunk) -> Mapping[str, Any]:
            nonlocal script_tokens
            script_tokens += len(chunk.ids)
            return choice({"content": chunk.text})

        def end() -> Sequence[str]:
            counts = {"prompt_tokens": 3, "completion_tokens": script_tokens}
            usage = {**counts, "total_tokens": 3 + script_tokens}
            is_over = self._play.script(prompt).fault is Fault.CANCELLED
            is_told = not prompt.startswith(UNCOUNTED)
            told = [{**common, "choices": [], "usage": usage}] if is_told else []
            last = choice({"content": ""}, "cancelled" if is_over else "length")
            return (*map(json.dumps, [last, *told]), "[DONE]")

        role = choice({"role": "assistant", "content": ""}) if is_chat else None
        return await self._answer(request, prompt, message, end, role)

    async def _answer(
        self, request: web.Request, prompt: str, message: Any, end: Any, role: Any = None
    ) -> web.StreamResponse:
        script = self._play.script(prompt)
        if script.fault is Fault.REFUSE:
            return web.json_response({"error": "Exceeds maximum queue size"}, status=503)
        if script.fault is Fault.LIMIT:
            later = {"Retry-After": "9"}
            return web.json_response({"error": "too often"}, status=429, headers=later)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if role:
            # A chat begins with a role, at once: no token, which no client may count as one.
            self._play.sends(prompt)
            await response.prepare(request)
            await response.write(f"data: {json.dumps(role)}\n\n".encode())
        # Other headers come with the first event, as those of a request that waits in a queue.
        async for chunk in self._play.chunks(prompt, script):
            if not response.prepared:
                await response.prepare(request)
            await response.write(f"data: {json.dumps(message(chunk))}\n\n".encode())
        if script.fault is Fault.BREAK:
            assert request.transport
            request.transport.abort()
            return response
        if script.fault is Fault.ERROR:
            await response.write(b'data: {"error": "out of luck"}\n\n')
        elif script.fault is Fault.NONSENSE:
            nonsense = {"choices": [3], "text_output": 3, "num_output_tokens": "many"}
            await response.write(f"data: {json.dumps(nonsense)}\n\n".encode())
        elif script.fault in (Fault.NONE, Fault.CANCELLED, Fault.TOO_MUCH) and end:
            for line in end():
                await response.write(f"data: {line}\n\n".encode())
            if script.fault is Fault.TOO_MUCH:
                await response.write(f"data: {json.dumps(message(chunk))}\n\n".encode())
        await response.write_eof()
        return response


PROTOCOLS = ("grpc", "triton", "triton+http", "openai", "openai chat")
UNCOUNTED = "uncounted"
"""Begins a prompt whose tokens the OpenAI server does not tell."""


@asynccontextmanager
async def serving(protocol: str, play: Play) -> AsyncIterator[Url]:
    """Serves a play by a protocol."""
    if protocol in ("grpc", "triton"):
        server = grpc.aio.server()
        if protocol == "grpc":
            router_pb2_grpc.add_MeshServiceServicer_to_server(NativeServer(play), server)
        else:
            server.add_generic_rpc_handlers((KserveServer(play).handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield Url(protocol, (f"127.0.0.1:{port}",))
        finally:
            await server.stop(None)
        return
    runner = web.AppRunner(HttpServer(play).app(), access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        path = "/v1/completions" if protocol == "openai" else ""
        yield Url(protocol.removesuffix(" chat"), (f"{host}:{port}",), path)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await runner.cleanup()
