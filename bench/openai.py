"""Measures the door for OpenAI's clients beside the native door and Triton's `ensemble`, of one mesh, in turn.

Streams: 64 at once of one conversation, at a 10 ms step, as `/v1/chat/completions` and by the native API, with a
connection for each stream, as HTTP/1.1 has, and with one for all; CPU µs of all services a token, starts included.
Requests: one-token texts, 32 at once, as `/v1/completions` and by `ensemble`, with an engine as fast as it can be;
requests a second, and CPU µs of all services each. Ratios are those of the OpenAI door to another, medians of pairs.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import uvloop
from _doors import DOORS
from _stack import Stack, cpu_seconds, renderers_of, stack
from start import CONNECTIONS, LONE_TEXT, Found, ask, connections
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.client import chat_item
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

TALK = [{"role": "user", "content": "A function that loads a file of JSON"}]
STEP_MS, AT_ONCE = 10, 32
ENGINE = ("--simulated-vocabulary-size", "6144")
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Call = Callable[[], Awaitable[None]]


class Http:
    """A client of HTTP/1.1 with a connection for each request at a time."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._free: list[Connection] = []

    async def post(self, path: str, fields: dict[str, Any]) -> bytes:
        """The body of an answer. Raises SystemExit unless the status is 200."""
        body = json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        if not self._free:
            self._free.append(await asyncio.open_connection(self._host, int(self._port)))
        reader, writer = self._free.pop()
        writer.write(head.encode() + body)
        told = await reader.readuntil(b"\r\n\r\n")
        answer = b""
        if b"chunked" in told:
            while size := int(await reader.readline(), 16):
                answer += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        else:
            length = told.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
            answer = await reader.readexactly(int(length))
        self._free.append((reader, writer))
        if not told.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"{told.decode()}{answer.decode()}")
        return answer


async def native_stream(connection: ClientConnection, tokens: int) -> None:
    config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=tokens, ignore_end_id=True))
    request = router_pb.GenerateRequest(items=[chat_item(TALK)], config=config)
    await ask(connection, DOORS["native"], request.SerializeToString(), tokens)


async def chat_stream(http: Http, tokens: int) -> None:
    fields = {"messages": TALK, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    answer = await http.post("/v1/chat/completions", fields | {"temperature": 0})
    *parts, last, _ = answer.split(b"\n\n")
    if last != b"data: [DONE]" or b'"finish_reason":"length"' not in parts[-1]:
        raise SystemExit(f"a stream of {tokens} tokens is incomplete: {parts[-1:]}")


async def ensemble_request(connection: ClientConnection) -> None:
    door = DOORS["ensemble"]
    await ask(connection, door, door.request(LONE_TEXT, 1), 1)


async def completion(http: Http) -> None:
    fields = {"prompt": LONE_TEXT, "max_tokens": 1, "ignore_eos": True, "temperature": 0}
    answer = json.loads(await http.post("/v1/completions", fields))
    if answer["usage"]["completion_tokens"] != 1:
        raise SystemExit(f"an answer of one token is incomplete: {answer}")


def cpu(mesh: Stack) -> float:
    """The time of all services so far, and of what renders templates."""
    renderers = renderers_of(mesh.pids["tokenizer"])
    return sum(mesh.cpu_seconds().values()) + sum(map(cpu_seconds, renderers))


async def at_once(calls: Sequence[Call], count: int) -> float:
    """Has so many calls served, by as many at once as there are `calls`. Returns the seconds."""
    left = iter(range(count))

    async def client(call: Call) -> None:
        for _ in left:
            await call()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for call in calls:
            group.create_task(client(call))
    return time.perf_counter() - began


async def measure_streams(streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    with stack("--simulated-timing-step-ms", str(STEP_MS), *ENGINE, http_port="0") as mesh:
        http = Http(mesh.http_address)
        async with connections(mesh.address, streams) as opened:
            sides: dict[str, Sequence[Call]] = {
                "openai": [lambda: chat_stream(http, tokens)] * streams,
                "native": [partial(native_stream, each, tokens) for each in opened],
                "native_one_connection": [partial(native_stream, opened[0], tokens)] * streams,
            }
            return await in_turn(mesh, sides, streams, tokens, rounds)


async def measure_requests(count: int, rounds: int) -> dict[str, Any]:
    with stack("--simulated-timing-step-ms", "0", *ENGINE, http_port="0") as mesh:
        http = Http(mesh.http_address)
        async with connections(mesh.address, CONNECTIONS) as opened:
            sides: dict[str, Sequence[Call]] = {
                "openai": [lambda: completion(http)] * AT_ONCE,
                "ensemble": [
                    partial(ensemble_request, opened[n % CONNECTIONS]) for n in range(AT_ONCE)
                ],
            }
            return await in_turn(mesh, sides, count, 1, rounds)


async def in_turn(
    mesh: Stack, sides: dict[str, Sequence[Call]], count: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Figures of the sides, and the ratios of the first to the others."""
    found, names = Found(), [*sides]
    ratios = defaultdict[str, list[float]](list)
    for turn in range(rounds + 1):
        of_turn: dict[str, dict[str, float]] = {}
        for name in names if turn % 2 else reversed(names):
            before = cpu(mesh)
            seconds = await at_once(sides[name], count)
            # What the services clean up belongs to the turn.
            await asyncio.sleep(0.2)
            used = (cpu(mesh) - before) * 1e6 / (count * tokens)
            of_turn[name] = {"cpu_us": used, "per_second": count / seconds}
        for name, figures in of_turn.items() if turn else ():
            for kind, value in figures.items():
                found.note(f"{name}_{kind}", value)
                ratios[f"{kind}_over_{name}"].append(of_turn[names[0]][kind] / value)
    return found.medians() | {
        name: round(statistics.median(each), 3)
        for name, each in ratios.items()
        if not name.endswith(f"_over_{names[0]}")
    }


async def main(arguments: argparse.Namespace) -> None:
    streams = await measure_streams(arguments.streams, arguments.tokens, arguments.rounds)
    requests = await measure_requests(arguments.requests, arguments.rounds)
    print(json.dumps({"streams": streams, "requests": requests}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--requests", type=int, default=2000, help="of a turn")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    return parser.parse_args()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(parse()))
