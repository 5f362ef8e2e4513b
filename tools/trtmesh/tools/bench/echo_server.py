"""A server that does nothing but answer, by each protocol: what a client costs beside it is the client's own.

`python -m trtmesh.tools.bench.echo_server PROTOCOL` prints its address, and serves until its standard input ends. A
prompt has two numbers, chunks and milliseconds between them; each chunk is the time at which it was sent.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import grpc
import orjson
import uvloop
from aiohttp import web
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.kserve import model_config_pb2
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2

INPUTS = {
    "text_input": model_config_pb2.TYPE_STRING,
    "max_tokens": model_config_pb2.TYPE_INT32,
    "stream": model_config_pb2.TYPE_BOOL,
}


async def stamps(prompt: str) -> AsyncIterator[str]:
    chunks, gap_ms = map(int, prompt.split())
    due = time.monotonic()
    for _ in range(chunks):
        if gap_ms:
            due += gap_ms / 1000
            await asyncio.sleep(due - time.monotonic())
        yield f"{time.monotonic():.6f} "


async def generate(request: Any, _: Any) -> AsyncIterator[Any]:
    offset = 0
    async for stamp in stamps(request.items[0].prompt.text):
        tokens = router_pb2.TokensGenerated(token_offset=offset, token_ids=[1], text=stamp)
        yield _native(tokens=tokens)
        offset += 1
    usage = pb.Usage(generated_tokens=offset)
    yield _native(item_finished=router_pb2.ItemFinished(usage=usage))


def _native(**event: Any) -> Any:
    return router_pb2.GenerateResponse(events=[router_pb2.GenerateEvent(**event)])


async def model_config(_: Any, __: Any) -> Any:
    config = model_config_pb2.ModelConfig(name="echo", max_batch_size=1)
    config.model_transaction_policy.decoupled = True
    for name, kind in INPUTS.items():
        config.input.add(name=name, data_type=kind, dims=[1])
    return kserve.ModelConfigResponse(config=config)


async def metadata(_: Any, __: Any) -> Any:
    return kserve.ServerMetadataResponse(name="echo")


async def stream_infer(requests: AsyncIterator[Any], _: Any) -> AsyncIterator[Any]:
    async for request in requests:
        async for stamp in stamps(_prompt(request)):
            yield kserve.ModelStreamInferResponse(infer_response=_response(stamp))
        last = kserve.ModelStreamInferResponse()
        last.infer_response.parameters["triton_final_response"].bool_param = True
        yield last


async def infer(request: Any, _: Any) -> Any:
    return _response("".join([stamp async for stamp in stamps(_prompt(request))]))


def _prompt(request: Any) -> str:
    at = next(n for n, given in enumerate(request.inputs) if given.name == "text_input")
    return str(request.raw_input_contents[at][4:], "utf-8")


def _response(text: str) -> Any:
    response = kserve.ModelInferResponse()
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    response.raw_output_contents.append(struct.pack("<I", len(text)) + text.encode())
    return response


async def events(request: web.Request) -> web.StreamResponse:
    """generate_stream, completions and chats: each client reads its own field."""
    body = orjson.loads(await request.read())
    prompt = body.get("text_input") or body.get("prompt") or body["messages"][0]["content"]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    async for stamp in stamps(prompt):
        choices = [{"text": stamp} if "prompt" in body else {"delta": {"content": stamp}}]
        event = {"text_output": stamp} if "text_input" in body else {"choices": choices}
        await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
    if "text_input" not in body:
        await response.write(b"data: [DONE]\n\n")
    return response


async def about(_: web.Request) -> web.Response:
    return web.json_response({"name": "echo"})


async def _serve(protocol: str) -> None:
    if protocol in ("triton+http", "openai"):
        app = web.Application()
        app.router.add_post("/{path:.*}", events)
        app.router.add_get("/v2", about)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
    else:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(tuple(_handlers()))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)


UNARY, STREAMED = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
METHODS: Mapping[str, Mapping[str, tuple[Any, Any, Any]]] = {
    "trtmesh.v1.MeshService": {"Generate": (STREAMED, generate, router_pb2.GenerateRequest)},
    "inference.GRPCInferenceService": {
        "ModelConfig": (UNARY, model_config, kserve.ModelConfigRequest),
        "ServerMetadata": (UNARY, metadata, kserve.ServerMetadataRequest),
        "ModelInfer": (UNARY, infer, kserve.ModelInferRequest),
        "ModelStreamInfer": (
            grpc.stream_stream_rpc_method_handler,
            stream_infer,
            kserve.ModelInferRequest,
        ),
    },
}
"""Of each service: how it is called, what answers, and its request."""


def _handlers() -> Iterator[grpc.GenericRpcHandler]:
    for service, methods in METHODS.items():
        handlers = {
            name: kind(answer, request.FromString, lambda message: message.SerializeToString())
            for name, (kind, answer, request) in methods.items()
        }
        yield grpc.method_handlers_generic_handler(service, handlers)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
