"""Draws top.svg, a look of `trtmesh top`: needs a stack of its own, started by `trtmesh up --engines 3`."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

from rich.console import Console
from trtmesh.cli.rates import Sample, measure
from trtmesh.cli.top import page
from trtmesh.client import AdminClient, Client

HEAD = Path(__file__).read_text(encoding="utf-8")[:900]
"""What the prompts share, so that the picture has KV reuse."""

PROMPTS = [f"{HEAD}\n\n{end}" for end in ("async def main()", "def look(", "class Top:", "for ")]
REQUESTS = 6
SETTLING_SECONDS, LOOK_SECONDS = 2.0, 1.0


async def look(admin: AdminClient) -> Sample:
    fleet, requests = await asyncio.gather(admin.list_workers(), admin.list_requests())
    return Sample(time.monotonic(), fleet, requests)


async def main() -> None:
    async with Client() as client, AdminClient() as admin, asyncio.TaskGroup() as load:
        for number in range(REQUESTS):
            request = client.complete(PROMPTS, max_tokens=512, request_id=f"request-{number + 1}")
            load.create_task(request)
        await asyncio.sleep(SETTLING_SECONDS)
        before = await look(admin)
        await asyncio.sleep(LOOK_SECONDS)
        after = await look(admin)
        console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True)
        console.print(page(console, admin.address, after, measure(before, after)))
        picture = Path(__file__).with_suffix(".svg")
        console.save_svg(str(picture), title="trtmesh top")
        for number in range(REQUESTS):
            await client.stop(f"request-{number + 1}")


if __name__ == "__main__":
    asyncio.run(main())
