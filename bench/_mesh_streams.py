"""A client of a mesh in a process of its own, and its driver.

The argument is the address. Prints a line when connected. Each line of standard input is a JSON object: `prompts` are
sent at once, each for `tokens` tokens; the answer is a line of JSON with the time at which they were sent, and of each
stream the time and the number of tokens of every message. Times are of `time.perf_counter`, which processes share.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import IO

import uvloop
from _doors import NATIVE
from _load import Stream, connections

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


def arrivals(stream: Stream, tokens: int) -> Arrivals:
    """Raises SystemExit unless all tokens came."""
    NATIVE.check(stream.messages, tokens)
    counts = map(NATIVE.count, stream.messages)
    return [(at, count) for at, count in zip(stream.times, counts, strict=True) if count]


async def main(address: str) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
    async with connections(address, 1) as (connection,):
        print("connected", flush=True)
        while line := await lines.get():
            asked = json.loads(line)
            given = [
                NATIVE.request(prompt, asked["tokens"], ignore_end_id=True)
                for prompt in asked["prompts"]
            ]
            streams, started = [Stream() for _ in given], time.perf_counter()
            receiving = map(Stream.receive, streams, repeat(connection), repeat(NATIVE), given)
            await asyncio.gather(*receiving)
            found = [arrivals(each, asked["tokens"]) for each in streams]
            print(json.dumps({"started": started, "streams": found}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
