"""Measures the door for OpenAI's clients beside the native door and Triton's `ensemble`, of one mesh, in turn.

Streams: 64 at once of one conversation, at a 10 ms step, as `/v1/chat/completions` and by the native API, with a
connection for each stream, as HTTP/1.1 has, and with one for all; CPU µs of all services a token, starts included.
Requests: one-token texts, 32 at once, as `/v1/completions` and by `ensemble`, with an engine as fast as it can be;
requests a second, and CPU µs of all services each. Ratios are those of the OpenAI door to another, medians of pairs.
With `--peer smg` also the same two of SMG, a gateway in Rust, before an engine of its own: its paths are those of the
OpenAI door.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Annotated, Any

from _doors import DOORS, Http
from _load import CONNECTIONS, Side, ask, connections, in_turn, run_bench
from _smg import MODEL, Smg, smg
from _stack import Stack, cpu_seconds, renderers_of, stack
from start import LONE_TEXT
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.client import chat_item
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

TALK = [{"role": "user", "content": "A function that loads a file of JSON"}]
STEP_MS, AT_ONCE = 10, 32
PEERS = ("smg",)
ENGINE = ("--simulated-vocabulary-size", "6144")


async def native_stream(connection: ClientConnection, tokens: int) -> None:
    config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=tokens, ignore_end_id=True))
    request = router_pb.GenerateRequest(items=[chat_item(TALK)], config=config)
    await ask(connection, DOORS["native"], request.SerializeToString(), tokens)


async def chat_stream(http: Http, tokens: int) -> None:
    fields = {
        "model": MODEL,
        "messages": TALK,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    answer = await http.post("/v1/chat/completions", fields | {"temperature": 0})
    *parts, last, _ = answer.split(b"\n\n")
    if last != b"data: [DONE]" or b'"finish_reason":"length"' not in b"".join(parts[-2:]):
        raise SystemExit(f"a stream of {tokens} tokens is incomplete: {parts[-1:]}")


async def ensemble_request(connection: ClientConnection) -> None:
    door = DOORS["ensemble"]
    await ask(connection, door, door.request(LONE_TEXT, 1), 1)


async def completion(http: Http) -> None:
    fields = {
        "model": MODEL,
        "prompt": LONE_TEXT,
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
    }
    answer = json.loads(await http.post("/v1/completions", fields))
    if answer["usage"]["completion_tokens"] != 1:
        raise SystemExit(f"an answer of one token is incomplete: {answer}")


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


async def measure_streams(
    streams: int, tokens: int, rounds: int, peer: str | None
) -> dict[str, Any]:
    flags = ("--simulated-timing-step-ms", str(STEP_MS), *ENGINE)
    with stack(*flags, "--model", MODEL, http_port="0") as mesh:
        chat = partial(chat_stream, Http(mesh.http_address), tokens)
        own = partial(cpu, mesh)
        async with connections(mesh.address, streams) as opened, peers_of(peer, flags) as peers:
            one = partial(native_stream, opened[0], tokens)
            sides = {
                "openai": Side([chat] * streams, own),
                "native": Side([partial(native_stream, each, tokens) for each in opened], own),
                "native_one_connection": Side([one] * streams, own),
            }
            for name, each in peers.items():
                other = partial(chat_stream, Http(each.url), tokens)
                sides[name] = Side([other] * streams, each.cpu_seconds)
            return await compared(sides, streams, tokens, rounds)


async def measure_requests(count: int, rounds: int, peer: str | None) -> dict[str, Any]:
    flags = ("--simulated-timing-step-ms", "0", *ENGINE)
    with stack(*flags, "--model", MODEL, http_port="0") as mesh:
        own = partial(cpu, mesh)
        async with (
            connections(mesh.address, CONNECTIONS) as opened,
            peers_of(peer, flags) as peers,
        ):
            asked = [partial(ensemble_request, opened[n % CONNECTIONS]) for n in range(AT_ONCE)]
            sides = {
                "openai": Side([partial(completion, Http(mesh.http_address))] * AT_ONCE, own),
                "ensemble": Side(asked, own),
            }
            for name, each in peers.items():
                other = partial(completion, Http(each.url))
                sides[name] = Side([other] * AT_ONCE, each.cpu_seconds)
            return await compared(sides, count, 1, rounds)


async def compared(
    sides: Mapping[str, Side], count: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Figures of the sides, and the ratios of the first to the others."""
    turns = {name: partial(side.turn, count, tokens) for name, side in sides.items()}
    (_, first), *others = (found := await in_turn(turns, rounds)).items()
    figures = {
        f"{name}_{kind}": value
        for name, each in found.items()
        for kind, value in each.medians().items()
    }
    return figures | {
        f"{kind}_over_{name}": round(statistics.median(ratios), 3)
        for name, other in others
        for kind, ratios in first.ratios(other).items()
    }


async def main(
    *,
    streams: int = 64,
    tokens: int = 384,
    requests: int = 2000,
    rounds: int = 8,
    peer: Annotated[str | None, PEERS] = None,
) -> None:
    """So many `requests` in a turn, and `rounds` turns of each side."""
    found = {
        "streams": await measure_streams(streams, tokens, rounds, peer),
        "requests": await measure_requests(requests, rounds, peer),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    run_bench(main)
