"""Well-behaved streams and short calls in a process of their own, so that only the router can delay them.

Prints a line when all streams run, then one of JSON for each line of standard input, about the time since the line
before: the longest gap between two messages of a stream, and the times to the first tokens of calls for one token, made
one after the other, in milliseconds. Ends if a stream ends early, or lacks or repeats a token.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import uvloop
from trtmesh.chassis.grpc.client import ClientConnection, Method, connected
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

GENERATE: Method[bytes, router_pb.GenerateResponse] = Method(
    "/trtmesh.v1.MeshService/Generate", bytes, router_pb.GenerateResponse.FromString
)
ENDLESS = 10_000_000
WARM_MESSAGES = 10
PAUSE_SECONDS = 0.01
"""Between two short calls."""


def _request(max_tokens: int) -> bytes:
    stopping = pb.StoppingConfig(max_tokens=max_tokens, ignore_end_id=True)
    config = pb.GenerationConfig(stopping=stopping)
    item = router_pb.GenerateItem(prompt=pb.Prompt(text="a healthy stream"))
    return router_pb.GenerateRequest(items=[item], config=config).SerializeToString()


class ShortCalls:
    """Calls for one token, and how long each waited for it."""

    def __init__(self) -> None:
        self._request = _request(1)
        self._began = 0.0
        self._waits = list[float]()

    async def run(self, connection: ClientConnection) -> None:
        while True:
            self._began = time.perf_counter()
            call = connection.open(GENERATE)
            await call.write(self._request)
            call.half_close()
            async for response in call:
                if any(event.HasField("tokens") for event in response.events):
                    self._waits.append(time.perf_counter() - self._began)
            self._began = 0.0
            await asyncio.sleep(PAUSE_SECONDS)

    def waits(self) -> list[float]:
        """The waits since the last call, an unfinished one included."""
        waits, self._waits = self._waits, []
        if self._began:
            waits.append(time.perf_counter() - self._began)
        return waits


class Streams:
    """The streams, and the longest gap of any."""

    def __init__(self, count: int, least_tokens: int) -> None:
        self._request, self._least_tokens = _request(ENDLESS), least_tokens
        self._arrivals = [0.0] * count
        self._messages = [0] * count
        self._longest = 0.0

    async def run(self, connection: ClientConnection, number: int) -> None:
        """One stream after the other: each ends at the model's length, which is minutes of attacks away."""
        while await self._stream(connection, number) >= self._least_tokens:
            pass
        raise SystemExit("a healthy stream ended")

    async def _stream(self, connection: ClientConnection, number: int) -> int:
        """The number of tokens of a whole stream."""
        call = connection.open(GENERATE)
        await call.write(self._request)
        call.half_close()
        tokens = 0
        async for response in call:
            for event in response.events:
                if event.HasField("tokens"):
                    if event.tokens.token_offset != tokens:
                        raise SystemExit(f"token {event.tokens.token_offset} came after {tokens}")
                    tokens += len(event.tokens.token_ids)
            now = time.perf_counter()
            self._longest = max(self._longest, now - self._arrivals[number])
            self._arrivals[number] = now
            self._messages[number] += 1
        return tokens

    @property
    def warm(self) -> bool:
        return min(self._messages) >= WARM_MESSAGES

    def gap(self) -> float:
        """The longest gap since the last call, an unfinished one included."""
        longest = max(self._longest, time.perf_counter() - min(self._arrivals))
        self._longest = 0.0
        return longest


async def main(address: str, count: int, least_tokens: int) -> None:
    """`least_tokens` are those of a whole stream, which ends at the model's length."""
    streams, calls = Streams(count, least_tokens), ShortCalls()
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
    async with connected(address, 2**26, 60.0) as connection, asyncio.TaskGroup() as group:
        running = [group.create_task(streams.run(connection, n)) for n in range(count)]
        while not streams.warm:  # noqa: ASYNC110 - a count sets no event
            await asyncio.sleep(0.02)
        running.append(group.create_task(calls.run(connection)))
        streams.gap()
        print("running", flush=True)
        while await lines.get():
            told = {"gap_ms": streams.gap() * 1e3, "firsts_ms": [w * 1e3 for w in calls.waits()]}
            print(json.dumps(told), flush=True)
        for task in running:
            task.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
