"""Items of a request start and end a few in a pass, whatever ends the request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import grpc
import pytest
from router.requests.test_live_request import Asked, router_of
from router.scene import scene
from router.scripted import ScriptedEngine, eventually
from trtmesh.chassis.errors import QueueFull
from trtmesh.chassis.fair.turns import MAX_IN_SLICE
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.item_events import ItemEvents

ITEMS = 1000


IDLE_PASSES = 100


class Passes:
    """How many items started and ended in each pass of the event loop."""

    def __init__(self) -> None:
        self.started = Counter[int]()
        self.ended = Counter[int]()
        self._number = 0
        self._left = 0
        """Passes until this stops to count them: a loop that is never idle takes a whole core."""

    def note(self, counter: Counter[int]) -> None:
        """Counts an item in this pass."""
        counter[self._number] += 1
        if not self._left:
            asyncio.get_running_loop().call_soon(self._count)
        self._left = IDLE_PASSES

    def _count(self) -> None:
        self._number += 1
        self._left -= 1
        if self._left:
            asyncio.get_running_loop().call_soon(self._count)

    async def live(self, item: ItemRun) -> None:
        """In place of an item's life."""
        item._task = asyncio.current_task()
        self.note(self.started)
        try:
            await asyncio.Event().wait()
        finally:
            self.note(self.ended)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    passes = Passes()

    async def live(item: ItemRun) -> None:
        await passes.live(item)

    monkeypatch.setattr(ItemRun, "run", live)
    return passes


async def reach_the_deadline(asked: Asked) -> None:
    await asked.end()
    assert asked.status is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("end", "seconds"),
    [(Asked.cancel, None), (Asked.stop, None), (reach_the_deadline, 7.0)],
)
async def test_items_start_and_end_a_few_in_a_pass(
    passes: Passes, end: Callable[[Asked], Awaitable[None]], seconds: float | None
) -> None:
    async with router_of(ScriptedEngine()) as client:
        asked = Asked(client, ITEMS, seconds)
        await eventually(lambda: seconds or passes.started.total() == ITEMS)
        await end(asked)
        await eventually(lambda: passes.ended.total() == passes.started.total() > 0)
    assert max(passes.started.values()) <= MAX_IN_SLICE
    assert max(passes.ended.values()) <= MAX_IN_SLICE


async def test_items_of_an_ended_request_do_not_start(passes: Passes) -> None:
    async with router_of(ScriptedEngine()) as client:
        asked = Asked(client, ITEMS)
        await eventually(lambda: passes.started)
        await asked.cancel()
        await asked.end()
        await eventually(lambda: not client.gauge("live_items"))
        assert passes.ended.total() == passes.started.total()
    assert max(passes.started.values()) <= MAX_IN_SLICE


@pytest.mark.parametrize("is_refused", [False, True])
async def test_encoded_items_go_on_a_few_in_a_pass(
    monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    """A tokenizer answers hundreds of them together."""
    passes = Passes()

    async def go_on(item: ItemRun, *_: object) -> None:
        passes.note(passes.started)
        raise QueueFull("all go on")

    def fail(events: ItemEvents, *_: object) -> None:
        passes.note(passes.ended)

    async def admit(item: ItemRun) -> None:
        admitted.append(item)

    admitted = list[ItemRun]()
    monkeypatch.setattr(ItemRun, "_admit", admit)
    monkeypatch.setattr(ItemRun, "_open", go_on)
    if is_refused:
        monkeypatch.setattr(ItemEvents, "failed", fail)
    async with scene() as router:
        router.tokenizer.answering.clear()
        asked = router.ask(*["" if is_refused else "x"] * 200)
        await eventually(lambda: len(admitted) == 200)
        router.tokenizer.answering.set()
        await eventually(lambda: (passes.ended if is_refused else passes.started).total() == 200)
        asked.cancel()
    assert max((passes.ended if is_refused else passes.started).values()) <= MAX_IN_SLICE
