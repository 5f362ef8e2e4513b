"""A client process: opens streams and reports each message until killed. `hasty_client.py ROUTER STREAMS`"""

from __future__ import annotations

import asyncio
import sys

from trtmesh.client import Client


async def main(router: str, streams: int) -> None:
    async with Client(router) as client:
        await asyncio.gather(*(read(client, number) for number in range(streams)))


async def read(client: Client, number: int) -> None:
    """Reads one stream and reports every message."""
    async for event in client.generate([f"hasty {number}"], max_tokens=10_000):
        print(number, type(event).__name__, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
