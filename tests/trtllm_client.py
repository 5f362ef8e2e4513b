"""A client of TrtllmService, made of grpcio and the stubs of the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from engine_streams import PATIENCE_SECONDS, serving
from recording_backend import RecordingBackend
from smg_grpc_proto.generated import trtllm_service_pb2 as tpb
from smg_grpc_proto.generated import trtllm_service_pb2_grpc as tpb_grpc
from trtmesh.engine.backend import Submission

DEMO = Path(__file__).parents[1] / "models" / "demo"
PROMPT = (40, 41, 42)


@asynccontextmanager
async def stub_of(address: str, *more: tuple[str, int]) -> AsyncIterator[Any]:
    """A stub, over a connection of its own; `more` are options of the channel."""
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        *more,
    ]
    async with grpc.aio.insecure_channel(address, options) as channel:
        yield tpb_grpc.TrtllmServiceStub(channel)


def request(
    request_id: str = "r", prompt: Sequence[int] = PROMPT, max_tokens: int = 8, **fields: Any
) -> tpb.GenerateRequest:
    return tpb.GenerateRequest(
        **{
            "request_id": request_id,
            "tokenized": tpb.TokenizedInput(input_token_ids=prompt),
            "max_tokens": max_tokens,
            "streaming": True,
            **fields,
        }
    )


@dataclass
class Output:
    """One sequence, as a gateway sees it."""

    token_ids: list[int] = field(default_factory=list)
    """Those of the chunks."""
    chunks: int = 0
    complete: Any = None


async def collect(answers: Any, streaming: bool = True) -> dict[int, Output]:
    """Reads a call to its end and checks what holds for every one."""
    outputs: dict[int, Output] = {}
    while (answer := await answers.read()) is not grpc.aio.EOF:
        take(outputs, answer)
    for output in outputs.values():
        assert output.complete is not None
        if streaming:
            assert list(output.complete.output_token_ids) == output.token_ids
        else:
            assert output.chunks == 0
    return outputs


def take(outputs: dict[int, Output], answer: Any) -> None:
    kind = answer.WhichOneof("response")
    part = getattr(answer, kind)
    output = outputs.setdefault(part.sequence_index, Output())
    assert output.complete is None, "something after the last answer"
    if kind == "chunk":
        assert part.token_ids, "an empty chunk"
        output.token_ids += part.token_ids
        output.chunks += 1
        assert part.completion_tokens == len(output.token_ids)
    else:
        output.complete = part


async def generate(stub: Any, asked: tpb.GenerateRequest) -> dict[int, Output]:
    answers = stub.Generate(asked, timeout=PATIENCE_SECONDS)
    return await collect(answers, asked.streaming)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that must fail."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call ended well")


def tokens_of(outputs: Iterable[Output]) -> list[list[int]]:
    return [list(output.complete.output_token_ids) for output in outputs]


@asynccontextmanager
async def offering(backend: RecordingBackend, **settings: Any) -> AsyncIterator[Any]:
    """A stub of an engine in this process, with the demo model's tokenizer."""
    settings = {"trtllm_service": True, "model_dir": DEMO, **settings}
    async with serving(backend, **settings) as engine, stub_of(engine.address) as stub:
        yield stub


async def first_item(backend: RecordingBackend, call: Any, count: int = 1) -> Submission:
    """The latest of `count` items at the backend. Raises the status of a call that fails before."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(backend.items) < count:
            if call.done():
                await call.read()
            await asyncio.sleep(0.001)
    return backend.items[-1]
