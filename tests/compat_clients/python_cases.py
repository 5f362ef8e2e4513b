"""What every Python client does with a router: `python -m compat_clients.python_cases LIBRARY CASE OPTIONS`.

Runs in the library's own environment, with protobuf and the generated messages. A case that fails raises.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib import import_module
from typing import Any

from compat_clients.connection import Connection, Options, Refused
from trtmesh.kserve import grpc_service_pb2 as kserve
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2

GENERATE = "/trtmesh.v1.MeshService/Generate"
TRITON = "/inference.GRPCInferenceService/"
VOCABULARY = 6144
LARGE_BYTES = 60 * 2**20
ENDLESS = 20_000


class Raw:
    """A message that is its bytes."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def SerializeToString(self) -> bytes:
        return self.data

    @classmethod
    def FromString(cls, data: bytes) -> Raw:
        return cls(data)


def texts(*values: str) -> bytes:
    """Elements of a BYTES tensor."""
    encoded = [value.encode() for value in values]
    return b"".join(struct.pack("<I", len(each)) + each for each in encoded)


def infer(model: str, **inputs: tuple[str, list[int], bytes]) -> Any:
    """A Triton request with raw contents."""
    request = kserve.ModelInferRequest(model_name=model)
    for name, (datatype, shape, data) in inputs.items():
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(data)
    return request


def outputs(response: Any) -> dict[str, bytes]:
    return {
        output.name: data
        for output, data in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def generation(prompts: int, max_tokens: int, *, logits: bool = False) -> Any:
    config = pb.GenerationConfig(
        stopping=pb.StoppingConfig(max_tokens=max_tokens, ignore_end_id=True),
        output=pb.OutputConfig(generation_logits=logits),
    )
    items = [router_pb2.GenerateItem(prompt=pb.Prompt(text=f"one {n}")) for n in range(prompts)]
    return router_pb2.GenerateRequest(items=items, config=config)


async def events(answers: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for answer in answers:
        for event in answer.events:
            yield event


class Seen:
    """The tokens of each item so far, without a gap or a repeat."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.logit_bytes = 0
        self.finished = 0

    def see(self, event: Any) -> None:
        kind = event.WhichOneof("event")
        assert kind != "item_failed", event
        self.finished += kind == "item_finished"
        if kind == "tokens":
            known = self.tokens.get(event.batch_index, 0)
            assert event.tokens.token_offset == known, (event.tokens.token_offset, known)
            self.tokens[event.batch_index] = known + len(event.tokens.token_ids)
            self.logit_bytes += len(event.tokens.details.generation_logits.data)


async def health(connection: Connection) -> None:
    answer = await connection.unary("/grpc.health.v1.Health/Check", Raw(), Raw)
    assert answer.data == b"\x08\x01", answer.data


async def generate(connection: Connection) -> None:
    seen = Seen()
    async with connection.stream(GENERATE, generation(3, 64), router_pb2.GenerateResponse) as call:
        async for event in events(call.answers()):
            seen.see(event)
    assert (seen.tokens, seen.finished) == ({0: 64, 1: 64, 2: 64}, 3)


async def model_infer(connection: Connection) -> None:
    request = infer(
        "preprocessing",
        QUERY=("BYTES", [2, 1], texts("one two three", "four")),
        REQUEST_OUTPUT_LEN=("INT32", [2, 1], struct.pack("<2i", 3, 4)),
    )
    response = await connection.unary(TRITON + "ModelInfer", request, kserve.ModelInferResponse)
    found = outputs(response)
    assert struct.unpack("<2i", found["REQUEST_OUTPUT_LEN"]) == (3, 4)
    assert found["INPUT_ID"]


async def model_stream_infer(connection: Connection) -> None:
    """Two requests of a stream, the second sent when the first is answered."""
    async with connection.duplex(
        TRITON + "ModelStreamInfer", kserve.ModelStreamInferResponse
    ) as call:
        answers = call.answers()
        for name in ("first", "second"):
            request = infer(
                "ensemble",
                text_input=("BYTES", [1, 1], texts("def f(")),
                max_tokens=("INT32", [1, 1], struct.pack("<i", 20)),
                stream=("BOOL", [1, 1], b"\x01"),
            )
            request.id = name
            await call.send(request)
            async for answer in answers:
                assert not answer.error_message, answer.error_message
                assert answer.infer_response.id == name
                if answer.infer_response.parameters["triton_final_response"].bool_param:
                    break
            else:
                raise AssertionError("the stream ended early")
        await call.end()
        assert [answer async for answer in answers] == []


async def large(connection: Connection) -> None:
    """The logits of two prompts, in a single message."""
    length = LARGE_BYTES // (2 * 4 * VOCABULARY)
    request = infer(
        "tensorrt_llm",
        input_ids=(
            "INT32",
            [2, length],
            struct.pack(f"<{2 * length}i", *range(100, 100 + 2 * length)),
        ),
        input_lengths=("INT32", [2, 1], struct.pack("<2i", length, length)),
        request_output_len=("INT32", [2, 1], struct.pack("<2i", 1, 1)),
        return_context_logits=("BOOL", [2, 1], b"\x01\x01"),
    )
    response = await connection.unary(TRITON + "ModelInfer", request, kserve.ModelInferResponse)
    assert len(outputs(response)["context_logits"]) == LARGE_BYTES


async def pause(connection: Connection, seconds: float) -> None:
    """60 MiB of a stream, of which nothing is read for long after the first message."""
    items, tokens = 20, LARGE_BYTES // (20 * 4 * VOCABULARY)
    request, seen = generation(items, tokens, logits=True), Seen()
    async with connection.stream(GENERATE, request, router_pb2.GenerateResponse) as call:
        following = events(call.answers())
        seen.see(await anext(following))
        await asyncio.sleep(seconds)
        async for event in following:
            seen.see(event)
    assert seen.tokens == dict.fromkeys(range(items), tokens)
    assert (seen.logit_bytes, seen.finished) == (LARGE_BYTES, items)


async def cancel(connection: Connection) -> None:
    request, seen = generation(2, ENDLESS), Seen()
    async with connection.stream(GENERATE, request, router_pb2.GenerateResponse) as call:
        async with aclosing(call.answers()) as answers:
            async for event in events(answers):
                seen.see(event)
                if seen.tokens.get(0, 0) > 20:
                    break
        await call.cancel()
    # The connection is as good as before.
    await generate(connection)


async def deadline(connection: Connection) -> None:
    request, seen = generation(1, ENDLESS), Seen()
    async with (
        refused("DEADLINE_EXCEEDED"),
        connection.stream(GENERATE, request, router_pb2.GenerateResponse, seconds=2.0) as call,
    ):
        async for event in events(call.answers()):
            seen.see(event)
    assert 0 < seen.tokens[0] < ENDLESS
    await health(connection)


async def wrong_method(connection: Connection) -> None:
    for path in ("/trtmesh.v1.MeshService/Nothing", "/no.Service/Generate"):
        async with refused("UNIMPLEMENTED"):
            await connection.unary(path, Raw(), Raw)


@asynccontextmanager
async def refused(code: str) -> AsyncIterator[None]:
    """Checks that the calls of the block are refused."""
    try:
        yield
    except Refused as error:
        if error.code != code:
            raise
    else:
        raise AssertionError(f"no {code}")


async def keepalive(connection: Connection, seconds: float) -> None:
    """PINGs every second, without calls and with one."""
    await health(connection)
    await asyncio.sleep(seconds)
    await health(connection)
    await generate(connection)


async def tls(connection: Connection) -> None:
    await health(connection)
    await generate(connection)


async def compressed(connection: Connection) -> None:
    """A request of some KiB, and an answer of 192 KiB of which nearly every element is 0."""
    rows = 8
    request = infer(
        "preprocessing",
        QUERY=("BYTES", [rows, 1], texts(*["one two three " * 100] * rows)),
        REQUEST_OUTPUT_LEN=("INT32", [rows, 1], struct.pack(f"<{rows}i", *[3] * rows)),
        EMBEDDING_BIAS_WORDS=("BYTES", [rows, 1], texts(*["five"] * rows)),
        EMBEDDING_BIAS_WEIGHTS=("FP32", [rows, 1], struct.pack(f"<{rows}f", *[2.0] * rows)),
    )
    response = await connection.unary(TRITON + "ModelInfer", request, kserve.ModelInferResponse)
    bias = outputs(response)["EMBEDDING_BIAS"]
    assert len(bias) == 4 * rows * VOCABULARY
    assert set(struct.unpack(f"<{rows * VOCABULARY}f", bias)) == {0.0, 2.0}


CASES: dict[str, Any] = {
    "health": health,
    "generate": generate,
    "model_infer": model_infer,
    "model_stream_infer": model_stream_infer,
    "large": large,
    "pause": pause,
    "cancel": cancel,
    "deadline": deadline,
    "wrong_method": wrong_method,
    "keepalive": keepalive,
    "tls": tls,
    "compressed": compressed,
}


async def main(library: str, case: str, given: str) -> None:
    options: dict[str, Any] = json.loads(given)
    arguments = options.pop("arguments", {})
    module = import_module(f"compat_clients.{library}_connection")
    print(module.VERSION, case)
    async with module.connected(Options(**options)) as connection:
        await CASES[case](connection, **arguments)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
