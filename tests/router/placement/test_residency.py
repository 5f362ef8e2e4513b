"""The adapters of a worker after any changes are those of a worker told at once, and a change costs no more with ten
thousand of them."""

from __future__ import annotations

import random

from counting import counted_lines
from trtmesh.chassis.vocabulary import Adapter
from trtmesh.router.placement import AdapterNeed, Place, Residency
from trtmesh.router.placement.load_guard import LoadGuard
from trtmesh.router.placement.place import place
from trtmesh.router.placement.residency import NO_ADAPTERS, AdapterKey
from trtmesh.router.placement.snapshot import PlacementQuery, WorkerSnapshot


def adapter(number: int) -> Adapter:
    return Adapter(number, f"a{number % 5}" if number % 3 else "", "v")


def test_sums_are_those_of_what_is_held_and_in_use() -> None:
    chance = random.Random(11)
    adapters = NO_ADAPTERS
    held: dict[AdapterKey, Residency] = {}
    uses: dict[AdapterKey, list[int]] = {}
    for _ in range(1500):
        number = chance.randrange(40)
        key = number, "v"
        if chance.random() < 0.5:
            where = chance.choice([None, Place.HOST, Place.DEVICE])
            pinned = chance.random() < 0.3
            new = Residency(adapter(number), where, pinned=pinned) if where else None
            if new:
                held[key] = new
            else:
                held.pop(key, None)
            adapters = adapters.moved({key: new})
        elif chance.random() < 0.5 or key not in uses:
            uses.setdefault(key, []).append(number)
            adapters = adapters.used(AdapterNeed(adapter(number), rank=number % 7), 1)
        else:
            uses[key].pop()
            if not uses[key]:
                del uses[key]
            adapters = adapters.used(AdapterNeed(adapter(number), rank=number % 7), -1)
        assert adapters.held == held
        assert {key: use.sequences for key, use in adapters.in_use.items()} == {
            key: len(each) for key, each in uses.items()
        }
        assert adapters.rank == max((key[0] % 7 for key in uses), default=0)
        assert adapters.deliveries == sum(key not in held for key in uses)
        assert adapters.pinned == {key for key, each in held.items() if each.pinned}
        by_name = {
            name: adapters.named.get(name, ()) for each in held.values() for name in each.names
        }
        assert by_name == dict(adapters.named)
        assert all(
            {*keys} == {k for k, r in held.items() if n in r.names} for n, keys in by_name.items()
        )
        slots = adapters.reported(20, 20, 0)
        kept = {key for key, each in held.items() if each.pinned and each.place is Place.DEVICE}
        other = AdapterNeed(adapter(99))
        assert slots.is_full(other) == (len(kept | uses.keys()) >= 20)
    lost = adapters.lost()
    assert not lost.held
    assert lost.deliveries == len(uses)


def test_placing_an_item_costs_as_much_beside_ten_thousand_adapters() -> None:
    costs = []
    for count in (10, 10_000):
        guard = LoadGuard(lambda: None)
        for n in range(count):
            guard.adapters_moved({(n, "v"): Residency(adapter(n), Place.HOST, 8)}, 0.0)
        for number in range(count):
            guard.book(1, 1, 0.0, AdapterNeed(adapter(number), rank=number % 7))
        need = AdapterNeed(adapter(count + 1), rank=8, deliverable=True)
        query = PlacementQuery("m", adapter=need)
        with counted_lines() as lines:
            worker = WorkerSnapshot(
                "w:1", "w", "m", "", frozenset(), adapters=guard.adapters.reported(2**15, 1, 1)
            )
            place("auto", [worker, worker._replace(address="w:2")], query)
            booking = guard.book(1, 1, 0.0, need)
            guard.adapters_moved({need.key: Residency(need.adapter, Place.DEVICE, 8)}, 1.0)
            guard.adapters_moved({(3, "v"): None}, 1.0)
            booking.release(2.0)
        costs.append(lines.count)
    few, many = costs
    assert abs(few - many) < 20 < few
