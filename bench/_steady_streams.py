"""Streams beside a burst, in a process of their own so that only the mesh delays them.

Arguments: address, number of streams, door, tokens of a stream, after which another one follows. Prints a line when all
streams run, then one for each line of standard input: the longest gap in milliseconds between two messages of a stream
since the line before.
"""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop
from _doors import DOORS, Door
from _load import connections
from trtmesh.chassis.grpc.client import ClientConnection

ENDLESS = 1_000_000
WARM_MESSAGES = 20


class Streams:
    """Streams of so many tokens one after the other, and the longest gap of any."""

    def __init__(self, door: Door, tokens: int) -> None:
        self._door = door
        self._tokens = tokens
        self.longest = 0.0
        self.arrivals: dict[int, float] = {}
        self.messages = 0

    async def run(self, connection: ClientConnection, number: int) -> None:
        await self._once(connection, number)
        if self._tokens == ENDLESS:
            raise SystemExit("a stream ended")
        while True:
            # The next one's start is no gap.
            del self.arrivals[number]
            await self._once(connection, number)

    async def _once(self, connection: ClientConnection, number: int) -> None:
        call = connection.open(self._door.method)
        await call.write(self._door.request(f"stream {number}", self._tokens))
        call.half_close()
        async for _ in call:
            now = time.perf_counter()
            self.longest = max(self.longest, now - self.arrivals.get(number, now))
            self.arrivals[number] = now
            self.messages += 1

    def gap(self) -> float:
        """The longest gap since the last call, an unfinished one included."""
        now = time.perf_counter()
        longest = max(self.longest, 0.0, *(now - arrival for arrival in self.arrivals.values()))
        self.longest = 0.0
        return longest


async def main(address: str, count: int, door: Door, tokens: int) -> None:
    streams = Streams(door, tokens)
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: lines.put_nowait(sys.stdin.readline()))
    async with connections(address, 1) as (connection,), asyncio.TaskGroup() as group:
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
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), DOORS[sys.argv[3]], int(sys.argv[4])))
