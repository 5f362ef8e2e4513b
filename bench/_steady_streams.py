"""Streams beside a burst, in a process of their own so that only the mesh delays them.

Prints a line when all streams run, then one for each line of standard input: the longest gap in milliseconds between
two messages of a stream since the line before.
"""

from __future__ import annotations

# gRPC reads the environment when it is first imported.
import trtmesh.chassis.environment  # noqa: F401  # isort: skip

import asyncio
import sys
import time

import uvloop
from trtmesh.chassis.grpc.client import ClientConnection, Method, connected
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

GENERATE: Method[bytes, bytes] = Method("/trtmesh.v1.MeshService/Generate", bytes, bytes)
ENDLESS = 1_000_000
WARM_MESSAGES = 20


def request(prompt: str, max_tokens: int) -> bytes:
    config = pb.GenerationConfig(stopping=pb.StoppingConfig(max_tokens=max_tokens))
    item = router_pb.GenerateItem(prompt=pb.Prompt(text=prompt))
    return router_pb.GenerateRequest(items=[item], config=config).SerializeToString()


class Streams:
    """Streams that never end, and the longest gap of any."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.arrivals: dict[int, float] = {}
        self.messages = 0

    async def run(self, connection: ClientConnection, number: int) -> None:
        call = connection.open(GENERATE)
        await call.write(request(f"stream {number}", ENDLESS))
        call.half_close()
        async for _ in call:
            now = time.perf_counter()
            self.longest = max(self.longest, now - self.arrivals.get(number, now))
            self.arrivals[number] = now
            self.messages += 1
        raise SystemExit("a stream ended")

    def gap(self) -> float:
        """The longest gap since the last call, an unfinished one included."""
        now = time.perf_counter()
        longest = max(self.longest, *(now - arrival for arrival in self.arrivals.values()))
        self.longest = 0.0
        return longest


async def main(address: str, count: int) -> None:
    streams = Streams()
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
    async with connected(address, 2**26, 30.0) as connection, asyncio.TaskGroup() as group:
        running = [group.create_task(streams.run(connection, number)) for number in range(count)]
        while streams.messages < WARM_MESSAGES * count:  # noqa: ASYNC110 - a count sets no event
            await asyncio.sleep(0.05)
        streams.gap()
        print("running", flush=True)
        while await lines.get():
            print(streams.gap() * 1e3, flush=True)
        for task in running:
            task.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2])))
