"""A defect of this software where an item ends: that item alone ends with INTERNAL, and once."""

from __future__ import annotations

from typing import Any

import pytest
from router.scripted import LENGTH, eventually
from router.scripted_fleet import fleet
from trtmesh.chassis.fair.turns import StartQueue
from trtmesh.router.fleet.fleet import Fleet
from trtmesh.router.requests.item import ItemRun
from trtmesh.router.requests.item_events import ItemEvents


@pytest.mark.parametrize("in_the_step", [True, False])
@pytest.mark.parametrize(
    ("place", "name", "is_told"),
    [
        (ItemRun, "usage", True),
        (ItemEvents, "sequence_finished", True),
        (ItemEvents, "finished", True),
        (ItemEvents, "_put_finished", True),
        (Fleet, "learn_new_tokens", False),
        (ItemRun, "_abandon", False),
    ],
)
async def test_defect_at_the_end_of_an_item(
    place: type, name: str, is_told: bool, in_the_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the step of a worker, or in the task of the item; after its end it is in the log alone."""
    own, defects = getattr(place, name), 0

    def once(*args: Any, **values: Any) -> Any:
        nonlocal defects
        defects += 1
        if defects == 1:
            raise KeyError(name)
        return own(*args, **values)

    async with fleet() as on:
        if not in_the_step:
            monkeypatch.setattr(StartQueue, "enter", lambda _: False)
        monkeypatch.setattr(place, name, once)
        asked = on.ask([5], [6])
        await on.submitted(2)
        for engine in on.engines:
            for submit in engine.submits:
                await engine.step((submit.handle, 0, [7]), ends=[(submit.handle, LENGTH)])
        items = await asked
        assert defects > 1
        reasons = [item.error.reason if item.error else "" for item in items]
        assert sorted(reasons) == (["", "INTERNAL"] if is_told else ["", ""])
        assert {item.token_ids for item in items} == {(7,)}
        await eventually(lambda: not on.client.gauge("live_requests"))
        assert not on.client.gauge("live_items")
        assert not on.client.gauge("worker_bookings")
        # The workers had no part in it.
        assert on.client.gauge("ready_workers") == len(on.engines)
