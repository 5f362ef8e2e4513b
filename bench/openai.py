"""Measures the door for OpenAI's clients beside the native door and Triton's `ensemble`, of one mesh, in turn.

Streams: 64 at once of one conversation, at a 10 ms step, as `/v1/chat/completions` and by the native API, with a
connection for each stream, as HTTP/1.1 has, and with one for all; CPU µs of all services a token, starts included, and
the median time to the first token. Requests: texts of 200 tokens, for one token with 1 and 32 at once and for 8 tokens
with 16 at once, as `/v1/completions`, by the native API and by `ensemble`, with an engine as fast as it can be;
requests a second, and CPU µs of all services a token. Ratios are those of the OpenAI door to another, medians of pairs.
With `--peer smg` also the same of SMG, a gateway in Rust, before an engine of its own: its paths are those of the
OpenAI door.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from _doors import DOORS, NATIVE, Door, Http
from _load import CONNECTIONS, Side, ask, connections
from _options import run_bench, tell
from _smg import MODEL, Smg, smg
from _stack import Stack, cpu_seconds, renderers_of, stack
from _turns import Figures, in_turn
from start import LONE_TEXT
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.client import chat_item
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

TALK = [{"role": "user", "content": "A function that loads a file of JSON"}]
STEP_MS = 10
LOADS = {"1": (1, 1), "32": (32, 1), "16_of_8_tokens": (16, 8)}
"""Requests at a time, and the tokens of each, by name."""
PEERS = ("smg",)
ENGINE = ("--simulated-vocabulary-size", "6144")
FIELDS = {"model": MODEL, "ignore_eos": True, "temperature": 0}


async def native_stream(connection: ClientConnection, tokens: int) -> float:
    config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=tokens, ignore_end_id=True))
    request = router_pb.GenerateRequest(items=[chat_item(TALK)], config=config)
    return await ask(connection, NATIVE, request.SerializeToString(), tokens)


async def chat_stream(http: Http, tokens: int) -> float:
    began, parts = time.perf_counter(), list[float]()
    answer = await http.post(
        "/v1/chat/completions",
        FIELDS | {"messages": TALK, "max_tokens": tokens, "stream": True},
        lambda: parts.append(time.perf_counter()),
    )
    *events, last, _ = answer.split(b"\n\n")
    if last != b"data: [DONE]" or b'"finish_reason":"length"' not in b"".join(events[-2:]):
        raise SystemExit(f"a stream of {tokens} tokens is incomplete: {events[-1:]}")
    return parts[0] - began


async def completion(http: Http, tokens: int) -> float:
    began = time.perf_counter()
    fields = FIELDS | {"prompt": LONE_TEXT, "max_tokens": tokens}
    answer = json.loads(await http.post("/v1/completions", fields))
    if answer["usage"]["completion_tokens"] != tokens:
        raise SystemExit(f"an answer of {tokens} tokens is incomplete: {answer}")
    return time.perf_counter() - began


async def text(door: Door, connection: ClientConnection, tokens: int) -> float:
    return await ask(connection, door, door.request(LONE_TEXT, tokens), tokens)


def cpu(mesh: Stack) -> float:
    """The time of all services so far, and of what renders templates."""
    renderers = renderers_of(mesh.pids["tokenizer"])
    return sum(mesh.cpu_seconds().values()) + sum(map(cpu_seconds, renderers))


@asynccontextmanager
async def peers_of(name: str | None, flags: Sequence[str]) -> AsyncIterator[dict[str, Smg]]:
    """The other gateway by its name, before an engine with these flags; none without a name."""
    if name is None:
        yield {}
        return
    async with smg(*flags) as gateway:
        yield {name: gateway}


Ask = Callable[[int], Awaitable[float]]
"""Asks for so many tokens, and gives the seconds to the first."""


def side(asks: Sequence[Ask], at_once: int, tokens: int, used: Callable[[], float]) -> Side:
    return Side([partial(asks[n % len(asks)], tokens) for n in range(at_once)], used)


async def measure_streams(streams: int, tokens: int, rounds: int, peer: str | None) -> Figures:
    flags = ("--simulated-timing-step-ms", str(STEP_MS), *ENGINE)
    with stack(*flags, "--model", MODEL, http_port="0") as mesh:
        own = partial(cpu, mesh)
        async with connections(mesh.address, streams) as opened, peers_of(peer, flags) as peers:
            native: list[Ask] = [partial(native_stream, each) for each in opened]
            chat = partial(chat_stream, Http(mesh.http_address))
            sides = {
                "openai": side([chat], streams, tokens, own),
                "native": side(native, streams, tokens, own),
                "native_one_connection": side(native[:1], streams, tokens, own),
            }
            for name, each in peers.items():
                other = partial(chat_stream, Http(each.url))
                sides[name] = side([other], streams, tokens, each.cpu_seconds)
            return await compared(sides, streams, tokens, rounds)


async def measure_requests(count: int, rounds: int, peer: str | None) -> Figures:
    flags, figures = ("--simulated-timing-step-ms", "0", *ENGINE), Figures()
    with stack(*flags, "--model", MODEL, http_port="0") as mesh:
        own = partial(cpu, mesh)
        async with connections(mesh.address, CONNECTIONS) as opened, peers_of(peer, flags) as peers:
            asks: dict[str, tuple[list[Ask], Callable[[], float]]] = {
                "openai": ([partial(completion, Http(mesh.http_address))], own)
            }
            for name, door in DOORS.items():
                asks[name] = [partial(text, door, each) for each in opened], own
            for name, gateway in peers.items():
                asks[name] = [partial(completion, Http(gateway.url))], gateway.cpu_seconds
            for load, (at_once, tokens) in LOADS.items():
                sides = {
                    name: side(own_asks, at_once, tokens, used)
                    for name, (own_asks, used) in asks.items()
                }
                figures[load] = await compared(sides, count, tokens, rounds)
                tell(load, figures[load])
    return figures


async def compared(sides: Mapping[str, Side], count: int, tokens: int, rounds: int) -> Figures:
    """Figures of the sides, and the ratios of the first to the others."""
    turns = {name: partial(side.turn, count, tokens) for name, side in sides.items()}
    (_, first), *others = (found := await in_turn(turns, rounds)).items()
    figures = {
        f"{name}_{kind}": value
        for name, each in found.items()
        for kind, value in each.medians().items()
    }
    return figures | {
        f"{kind}_over_{name}": ratio
        for name, other in others
        for kind, ratio in first.over(other).items()
    }


async def main(
    *,
    streams: int = 64,
    tokens: int = 384,
    requests: int = 2000,
    rounds: int = 8,
    peer: Annotated[str | None, PEERS] = None,
) -> dict[str, Any]:
    """So many `requests` in a turn, and `rounds` turns of each side."""
    return {
        "streams": await measure_streams(streams, tokens, rounds, peer),
        "requests": await measure_requests(requests, rounds, peer),
    }


if __name__ == "__main__":
    run_bench(main)
