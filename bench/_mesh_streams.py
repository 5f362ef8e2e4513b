"""A client of a mesh in a process of its own, and its driver.

The argument is the address. Prints a line when connected. Each line of standard input is a JSON object: `prompts` are
sent at once, each for `tokens` tokens; the answer is a line of JSON with the time at which they were sent, and of each
stream the time and the number of tokens of every message. Times are of `time.perf_counter`, which processes share.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import uvloop
from trtmesh.chassis.grpc.client import ClientConnection, Method, connected
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

GENERATE: Method[bytes, bytes] = Method("/trtmesh.v1.MeshService/Generate", bytes, bytes)
MAX_MESSAGE_BYTES = 2**26
CONNECT_SECONDS = 30.0

Arrivals = list[tuple[float, int]]
"""The time and the number of tokens of each message of a stream."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Streams that began together."""

    started: float
    streams: list[Arrivals]

    @property
    def steady_rate(self) -> float:
        """Tokens a second while every stream runs: from the last first message to the first last one."""
        begin = max(arrivals[0][0] for arrivals in self.streams)
        end = min(arrivals[-1][0] for arrivals in self.streams)
        if end <= begin:
            raise SystemExit("no time in which all streams run; ask for more new tokens")
        count = sum(
            tokens for stream in self.streams for time_, tokens in stream if begin < time_ <= end
        )
        return count / (end - begin)

    @property
    def whole_rate(self) -> float:
        """Tokens a second from the start of the requests to the last token."""
        end = max(arrivals[-1][0] for arrivals in self.streams)
        return sum(tokens for stream in self.streams for _, tokens in stream) / (end - self.started)

    @property
    def first_token_seconds(self) -> list[float]:
        return [arrivals[0][0] - self.started for arrivals in self.streams]


class Clients:
    """Processes that share the streams of a load."""

    def __init__(self, pipes: Sequence[tuple[IO[str], IO[str]]]) -> None:
        self._pipes = pipes

    def ask(self, prompts: Sequence[str], tokens: int) -> Answer:
        """Raises SystemExit unless every token comes."""
        shares = [prompts[place :: len(self._pipes)] for place in range(len(self._pipes))]
        asked = [pair for pair in zip(self._pipes, shares, strict=True) if pair[1]]
        for (write, _), share in asked:
            write.write(json.dumps({"prompts": list(share), "tokens": tokens}) + "\n")
            write.flush()
        started, streams = [], []
        for (_, read), _ in asked:
            line = read.readline()
            if not line:
                raise SystemExit("a client ended")
            answer = json.loads(line)
            started.append(answer["started"])
            streams += [[(each[0], each[1]) for each in stream] for stream in answer["streams"]]
        return Answer(min(started), streams)


@contextmanager
def clients(address: str, count: int) -> Iterator[Clients]:
    """`count` processes until the block ends."""
    command = [sys.executable, __file__, address]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        pipes = [(child.stdin, child.stdout) for child in children if child.stdin and child.stdout]
        if not all(read.readline() for _, read in pipes):
            raise SystemExit("a client did not start")
        yield Clients(pipes)
    finally:
        for child in children:
            child.kill()
            child.wait()


def request(prompt: str, tokens: int) -> bytes:
    stopping = pb.StoppingConfig(max_tokens=tokens, ignore_end_id=True)
    item = router_pb.GenerateItem(prompt=pb.Prompt(text=prompt))
    config = pb.GenerationConfig(stopping=stopping)
    return router_pb.GenerateRequest(items=[item], config=config).SerializeToString()


async def stream(connection: ClientConnection, given: bytes) -> list[tuple[float, bytes]]:
    """The messages as bytes, parsed after all have come."""
    call = connection.open(GENERATE)
    await call.write(given)
    call.half_close()
    return [(time.perf_counter(), message) async for message in call]


def arrivals(messages: list[tuple[float, bytes]], tokens: int) -> Arrivals:
    """Raises SystemExit unless all tokens came."""
    found: Arrivals = []
    for arrival, message in messages:
        events = router_pb.GenerateResponse.FromString(message).events
        for event in events:
            if event.HasField("item_failed"):
                raise SystemExit(f"an item failed: {event.item_failed.error.message}")
        if count := sum(len(event.tokens.token_ids) for event in events):
            found.append((arrival, count))
    if (came := sum(count for _, count in found)) != tokens:
        raise SystemExit(f"{came} of {tokens} tokens came")
    return found


async def main(address: str) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
    async with connected(address, MAX_MESSAGE_BYTES, CONNECT_SECONDS) as connection:
        print("connected", flush=True)
        while line := await lines.get():
            asked = json.loads(line)
            given = [request(prompt, asked["tokens"]) for prompt in asked["prompts"]]
            started = time.perf_counter()
            messages = await asyncio.gather(*(stream(connection, each) for each in given))
            found = [arrivals(each, asked["tokens"]) for each in messages]
            print(json.dumps({"started": started, "streams": found}), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
