"""A steady load with known tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from trtmesh.chassis.errors import Unavailable
from trtmesh.client import Client, ItemResult
from trtmesh.client.results import Results

PROMPTS = [f"def {name}(items):\n    " for name in ("total", "largest", "join", "count")]
MAX_TOKENS = 96

PATIENCE_SECONDS = 120.0
"""Time limit of a lane for one request: a hanging stream fails the test."""


class Refused(Exception):
    """A router refused a request or was unreachable before the stream began."""


async def ask(client: Client, prompt: str, tokens: int = MAX_TOKENS) -> ItemResult:
    (item,) = await client.complete([prompt], max_tokens=tokens, ignore_end_id=True)
    assert item.error is None, item.error
    assert len(item.token_ids) == tokens
    return item


@dataclass
class Lane:
    """Consecutive requests; ends by itself only on a failure."""

    client: Client
    prompt: str
    right: ItemResult
    may_be_refused: bool
    begun: bool = False
    """Whether the current stream has delivered an event."""
    finished: int = 0
    refused: int = 0
    worst_gap_seconds: float = 0.0

    async def run(self) -> NoReturn:
        while True:
            try:
                item = await self._stream()
            except Refused:
                if not self.may_be_refused:
                    raise
                self.refused += 1
                await asyncio.sleep(0.1)
            else:
                assert item.error is None, item.error
                assert (item.token_ids, item.text) == (self.right.token_ids, self.right.text)
                self.finished += 1

    async def _stream(self) -> ItemResult:
        """The result of a request; records the longest gap of the stream."""
        results = Results(1)
        self.begun, last = False, time.monotonic()
        tokens = len(self.right.token_ids)
        events = self.client.generate([self.prompt], max_tokens=tokens, ignore_end_id=True)
        try:
            async with aclosing(events):
                async for event in events:
                    self.begun, now = True, time.monotonic()
                    self.worst_gap_seconds = max(self.worst_gap_seconds, now - last)
                    last = now
                    results.add(event)
        except Unavailable as error:
            if self.begun:
                raise
            raise Refused(f"{type(error).__name__}: {error}") from error
        (item,) = results.items
        return item


@dataclass
class Load:
    """The outcome of the streams."""

    lanes: Sequence[Lane]
    faults: list[str] = field(default_factory=list)
    """The failures that ended lanes; complete when the load is over."""

    @property
    def finished(self) -> int:
        return sum(lane.finished for lane in self.lanes)

    @property
    def refused(self) -> int:
        return sum(lane.refused for lane in self.lanes)

    @property
    def worst_gap_seconds(self) -> float:
        return max(lane.worst_gap_seconds for lane in self.lanes)


@asynccontextmanager
async def steady_load(
    addresses: str | Sequence[str],
    streams: int,
    *,
    tokens: int = MAX_TOKENS,
    may_be_refused: bool = False,
) -> AsyncIterator[Load]:
    """Keeps `streams` requests of at most `tokens` running inside the block, and finishes the last ones on exit.

    A draining router refuses new requests, and a restarting one is unreachable: with `may_be_refused`, such requests
    are repeated. A stream that has begun must complete.
    """
    async with Client(addresses) as client:
        # Different lengths, so that they do not start and end together.
        lengths = [tokens - number * tokens // 8 for number in range(len(PROMPTS))]
        right = [await ask(client, *asked) for asked in zip(PROMPTS, lengths, strict=True)]
        numbers = [index % len(PROMPTS) for index in range(streams)]
        load = Load([Lane(client, PROMPTS[n], right[n], may_be_refused) for n in numbers])
        tasks = [asyncio.create_task(lane.run()) for lane in load.lanes]
        try:
            await _finish_one_more_each(load, tasks)
            yield load
            await _finish_one_more_each(load, tasks)
        finally:
            load.faults += await _faults(tasks)


async def _finish_one_more_each(load: Load, tasks: Sequence[asyncio.Task[NoReturn]]) -> None:
    """Waits until every lane has finished another request or any has failed."""
    before = [lane.finished for lane in load.lanes]

    def unfinished() -> int:
        return sum(lane.finished == count for lane, count in zip(load.lanes, before, strict=True))

    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while unfinished() and not any(task.done() for task in tasks):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(
            f"{unfinished()} of {len(tasks)} streams did not finish within {PATIENCE_SECONDS:g} s"
        ) from None


async def _faults(tasks: Sequence[asyncio.Task[NoReturn]]) -> list[str]:
    """Ends the lanes; returns their failures."""
    # `cancel` does nothing to a finished task.
    cancelled = [task.cancel() for task in tasks]
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        f"{type(end).__name__}: {end}"
        for asked, end in zip(cancelled, ends, strict=True)
        if not (asked and isinstance(end, asyncio.CancelledError))
    ]
