"""Measures the door for OpenAI's clients beside the native door and Triton's `ensemble`, of one mesh, in turn.

Streams: 64 at once of one conversation, at a 10 ms step, as `/v1/chat/completions` and by the native API, with a
connection for each stream, as HTTP/1.1 has, and with one for all; CPU µs of all services a token, starts included.
Requests: one-token texts, 32 at once, as `/v1/completions` and by `ensemble`, with an engine as fast as it can be;
requests a second, and CPU µs of all services each. Ratios are those of the OpenAI door to another, medians of pairs.
With `--peer smg` also the same two of SMG, a gateway in Rust, before an engine of its own: its paths are those of the
OpenAI door.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from _doors import DOORS, Http
from _load import CONNECTIONS, Found, ask, at_once, connections, run_bench
from _smg import MODEL, Smg, smg
from _stack import Stack, cpu_seconds, renderers_of, stack
from start import LONE_TEXT
from trtmesh.chassis.grpc.client import ClientConnection
from trtmesh.client import chat_item
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

TALK = [{"role": "user", "content": "A function that loads a file of JSON"}]
STEP_MS, AT_ONCE = 10, 32
ENGINE = ("--simulated-vocabulary-size", "6144")
Call = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Side:
    """A way to ask, by as many calls as may be made at once, and the CPU time of what serves them so far."""

    calls: Sequence[Call]
    cpu_seconds: Callable[[], float]


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
            return await in_turn(sides, streams, tokens, rounds)


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
            return await in_turn(sides, count, 1, rounds)


async def in_turn(
    sides: Mapping[str, Side], count: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Figures of the sides, and the ratios of the first to the others."""
    found, names = Found(), [*sides]
    ratios = defaultdict[str, list[float]](list)
    for turn in range(rounds + 1):
        of_turn: dict[str, dict[str, float]] = {}
        for name in names if turn % 2 else reversed(names):
            side = sides[name]
            before = side.cpu_seconds()
            seconds = await at_once(side.calls, count)
            # What the services clean up belongs to the turn.
            await asyncio.sleep(0.2)
            used = (side.cpu_seconds() - before) * 1e6 / (count * tokens)
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
    given = arguments
    streams = await measure_streams(given.streams, given.tokens, given.rounds, given.peer)
    requests = await measure_requests(given.requests, given.rounds, given.peer)
    print(json.dumps({"streams": streams, "requests": requests}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--requests", type=int, default=2000, help="of a turn")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each side")
    parser.add_argument("--peer", choices=["smg"], help="another gateway to measure beside it")
    return parser.parse_args()


if __name__ == "__main__":
    run_bench(main(parse()))
