"""Measures the cost of a streamed token through the Triton door against the native API of the same router.

For 8, 64 and 256 streams at a 10 ms step: the services' CPU time per token by `ensemble`, by `tensorrt_llm_bls` and by
the native door, time to first token, and the ratio of the router's CPU between each model and the native door. The
client speaks tritonclient's messages over grpc.aio (tritonclient's own stream would be the bottleneck), keeps responses
as bytes and parses them after the run. Every text must equal the native one, or the run fails.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import argparse
import asyncio
import json
import os
import statistics
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvloop
from _stack import Stack, stack
from tritonclient.grpc import service_pb2 as kserve
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

PROMPT = "def fibonacci(n):\n    "
STEP_MS = 10
MODELS = ("ensemble", "tensorrt_llm_bls")

Figures = dict[str, Any]


@dataclass(slots=True)
class Record:
    """One stream's messages, with arrival times."""

    started: float = 0.0
    messages: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


class NativeDoor:
    """MeshService.Generate."""

    def __init__(self, max_tokens: int) -> None:
        config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=max_tokens))
        item = router_pb.GenerateItem(prompt=pb.Prompt(text=PROMPT))
        self._request = router_pb.GenerateRequest(items=[item], config=config).SerializeToString()

    def call(self, channel: grpc.aio.Channel) -> Any:
        generate: Any = channel.unary_stream("/trtmesh.v1.MeshService/Generate")
        return generate(self._request)

    def text(self, messages: list[bytes]) -> str:
        responses = map(router_pb.GenerateResponse.FromString, messages)
        return "".join(e.tokens.text for response in responses for e in response.events)


class TritonDoor:
    """ModelStreamInfer of one model, half-closed at once."""

    def __init__(self, model: str, max_tokens: int) -> None:
        request = kserve.ModelInferRequest(model_name=model)
        for name, data_type, data in (
            ("text_input", "BYTES", struct.pack("<I", len(PROMPT)) + PROMPT.encode()),
            ("max_tokens", "INT32", struct.pack("<i", max_tokens)),
            ("stream", "BOOL", b"\1"),
        ):
            request.inputs.add(name=name, datatype=data_type, shape=(1, 1))
            request.raw_input_contents.append(data)
        self._request = request.SerializeToString()

    def call(self, channel: grpc.aio.Channel) -> Any:
        infer: Any = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

        async def requests() -> Any:
            yield self._request

        return infer(requests())

    def text(self, messages: list[bytes]) -> str:
        texts = []
        for response in map(kserve.ModelStreamInferResponse.FromString, messages):
            if response.error_message:
                raise SystemExit(f"a request failed: {response.error_message}")
            texts += [data[4:] for data in response.infer_response.raw_output_contents]
        return b"".join(texts).decode()


Door = NativeDoor | TritonDoor


async def stream(call: Callable[[], Any], record: Record) -> None:
    record.started = time.perf_counter()
    async for message in call():
        record.messages.append(message)
        record.times.append(time.perf_counter())


async def run_once(mesh: Stack, door: Door, streams: int, max_tokens: int) -> Figures:
    """Sends `streams` requests at once through one door."""
    records = [Record() for _ in range(streams)]
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(mesh.address, options=options) as channel:
        await channel.channel_ready()
        before, client = mesh.cpu_seconds(), sum(os.times()[:2])
        await asyncio.gather(*(stream(lambda: door.call(channel), record) for record in records))
        after, client = mesh.cpu_seconds(), sum(os.times()[:2]) - client
    texts = {door.text(record.messages) for record in records}
    if len(texts) != 1:
        raise SystemExit("equal prompts got different texts")
    tokens = streams * max_tokens
    cpu = {name: (after[name] - before[name]) / tokens * 1e6 for name in after}
    return {
        "text": texts.pop(),
        "messages_per_token": sum(len(r.messages) for r in records) / tokens,
        "ttft_p50_ms": statistics.median(first_text_ms(door, record) for record in records),
        "cpu_us_per_token": cpu | {"client": client / tokens * 1e6},
        "services_cpu_us_per_token": sum(cpu.values()),
    }


def first_text_ms(door: Door, record: Record) -> float:
    """Milliseconds to the first text; the native door sends events before it."""
    pairs = zip(record.times, record.messages, strict=True)
    return next((at - record.started) * 1e3 for at, message in pairs if door.text([message]))


async def measure(mesh: Stack, streams: int, max_tokens: int, runs: int) -> Figures:
    """Measures the doors in turn, so that drift of the machine affects all; medians of the runs."""
    doors: dict[str, Door] = {"native": NativeDoor(max_tokens)}
    doors |= {model: TritonDoor(model, max_tokens) for model in MODELS}
    results: dict[str, list[Figures]] = {name: [] for name in doors}
    for _ in range(runs):
        for name, door in doors.items():
            results[name].append(await run_once(mesh, door, streams, max_tokens))
    texts = {result["text"] for every in results.values() for result in every}
    if len(texts) != 1:
        raise SystemExit("the doors gave different texts")
    figures = {name: median(every) for name, every in results.items()}
    for model in MODELS:
        native, own = figures["native"], figures[model]
        router = own["cpu_us_per_token"]["router"] / native["cpu_us_per_token"]["router"]
        own["router_cpu_to_native"] = round(router, 2)
        own["ttft_added_ms"] = round(own["ttft_p50_ms"] - native["ttft_p50_ms"], 2)
    print(f"{streams} streams: {json.dumps(figures)}", file=sys.stderr)
    return figures


def median(results: list[Figures]) -> Figures:
    """The run with the median CPU of the services, rounded."""
    middle = sorted(results, key=lambda r: r["services_cpu_us_per_token"])[len(results) // 2]
    return {
        "services_cpu_us_per_token": round(middle["services_cpu_us_per_token"], 1),
        "cpu_us_per_token": {n: round(us, 1) for n, us in middle["cpu_us_per_token"].items()},
        "messages_per_token": round(middle["messages_per_token"], 2),
        "ttft_p50_ms": round(statistics.median(r["ttft_p50_ms"] for r in results), 2),
    }


async def main(arguments: argparse.Namespace) -> None:
    results = {}
    with stack("--simulated-timing-step-ms", str(STEP_MS)) as mesh:
        await run_once(mesh, NativeDoor(32), 32, 32)
        for model in MODELS:
            await run_once(mesh, TritonDoor(model, 32), 32, 32)
        for streams in arguments.streams:
            results[str(streams)] = await measure(mesh, streams, arguments.tokens, arguments.runs)
    print(json.dumps({"step_ms": STEP_MS, "streams": results}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 64, 256])
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each stream")
    parser.add_argument("--runs", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse()))
