"""A steady load whose every token is known beforehand."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from trtmesh.chassis.errors import Unavailable
from trtmesh.client import Client, ItemResult
from trtmesh.client.results import Results

PROMPTS = [f"def {name}(items):\n    " for name in ("total", "largest", "join", "count")]
MAX_TOKENS = 96


async def ask(client: Client, prompts: Sequence[str]) -> Sequence[ItemResult]:
    return await client.complete(prompts, max_tokens=MAX_TOKENS, ignore_end_id=True)


async def watch(client: Client, prompt: str, load: Load) -> ItemResult:
    """What one prompt came to; notes the longest silence of its stream."""
    results = Results(1)
    last = time.monotonic()
    events = client.generate([prompt], max_tokens=MAX_TOKENS, ignore_end_id=True)
    async with aclosing(events):
        async for event in events:
            now = time.monotonic()
            load.worst_gap_seconds, last = max(load.worst_gap_seconds, now - last), now
            results.add(event)
    (item,) = results.items
    return item


@dataclass
class Load:
    """What the streams saw. `faults` must stay empty."""

    finished: int = 0
    refused: int = 0
    worst_gap_seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


async def _lane(
    client: Client, prompt: str, right: ItemResult, load: Load, router_restarts: bool
) -> None:
    while True:
        try:
            item = await watch(client, prompt, load)
        except Unavailable as error:
            # A router that drains refuses new requests, and one that starts anew is away: clients ask again.
            if not router_restarts:
                load.faults.append(f"{type(error).__name__}: {error}")
                return
            load.refused += 1
            await asyncio.sleep(0.1)
            continue
        if item.error is not None:
            load.faults.append(f"{item.error.reason}: {item.error.message}")
        elif (item.token_ids, item.text) != (right.token_ids, right.text):
            load.faults.append(f"{prompt!r} gave {item.token_ids}, not {right.token_ids}")
        load.finished += 1


@asynccontextmanager
async def steady_load(
    addresses: str | Sequence[str], streams: int, *, router_restarts: bool = False
) -> AsyncIterator[Load]:
    """Keeps `streams` requests going while inside; afterwards every lane has finished what it had."""
    load = Load()
    async with Client(addresses) as client:
        right = await ask(client, PROMPTS)
        lanes = [
            asyncio.create_task(
                _lane(client, PROMPTS[index % 4], right[index % 4], load, router_restarts)
            )
            for index in range(streams)
        ]
        try:
            await _rounds(load, streams)
            yield load
            await _rounds(load, streams)
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, return_exceptions=True)


async def _rounds(load: Load, count: int) -> None:
    """Waits until `count` more requests are finished, or one went wrong."""
    enough = load.finished + count
    while load.finished < enough and not load.faults:  # noqa: ASYNC110 - a look now and then is enough
        await asyncio.sleep(0.05)
