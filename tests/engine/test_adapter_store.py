"""Adapters in host memory: limits, holds, pins, the order of eviction, and news."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from counting import counted_lines
from trtmesh.chassis.errors import AdapterNotFound, AdaptersFull, InvalidField
from trtmesh.chassis.vocabulary import Adapter, Lora
from trtmesh.engine.adapter_store import AdapterStore, StoredAdapter, StoreLimits
from trtmesh.v1 import engine_pb2 as epb

SIZE = 10
HOST, ABSENT = epb.ADAPTER_PLACE_HOST, epb.ADAPTER_PLACE_ABSENT
Store = AdapterStore[StoredAdapter]


def store(adapters: int = 3, slots: int = 2) -> Store:
    return AdapterStore(StoreLimits(adapters * SIZE, slots))


def adapter(number: int, *, version: str = "v", pinned: bool = False) -> StoredAdapter:
    return StoredAdapter(
        identity=Adapter(number, "", version), rank=8, size_bytes=SIZE, pinned=pinned
    )


def filled(held: Store, *numbers: int) -> list[StoredAdapter]:
    adapters = [adapter(number) for number in numbers]
    for each in adapters:
        assert held.put(each) == []
    return adapters


def numbers(held: Store) -> list[int]:
    return [state.adapter.id for state in held.states]


def hold(held: Store, number: int, version: str = "v", holders: int = 1) -> StoredAdapter:
    return held.hold(Lora(number, version=version), holders)


def news(held: Store) -> dict[int, epb.AdapterPlace.ValueType]:
    return {each.adapter.id: each.place for each in held.take_news()}


def test_longest_unused_leaves_first() -> None:
    held = store()
    filled(held, 1, 2, 3)
    held.release(hold(held, 1))
    assert [each.identity.id for each in held.put(adapter(4))] == [2]
    assert numbers(held) == [3, 1, 4]
    assert (held.used_bytes, held.loads, held.evictions) == (3 * SIZE, 4, 1)
    assert news(held) == {1: HOST, 2: ABSENT, 3: HOST, 4: HOST}


def test_held_and_pinned_adapters_stay() -> None:
    held = store()
    used, _, _ = filled(held, 1, 2, 3)
    hold(held, 1, holders=2)
    held.retain(adapter_of(held, 2), pinned=True)
    assert [each.identity.id for each in held.put(adapter(4))] == [3]
    hold(held, 4)
    held.release(used)
    with pytest.raises(AdaptersFull) as full:
        held.put(adapter(5))
    assert (full.value.value, full.value.limit_field) == (str(SIZE), "adapters.host_bytes")
    assert numbers(held) == [2, 1, 4]
    held.release(used)
    assert [each.identity.id for each in held.put(adapter(5))] == [1]


def adapter_of(held: Store, number: int, version: str = "v") -> StoredAdapter:
    found = held.get(number, version)
    assert found is not None
    return found


def test_adapter_larger_than_the_memory_is_refused() -> None:
    held = store(adapters=0)
    with pytest.raises(InvalidField) as refused:
        held.put(adapter(1))
    assert refused.value.limit_field == "adapters.host_bytes"
    assert held.states == []


def test_unloaded_adapter_leaves_with_its_last_holder() -> None:
    held = store()
    filled(held, 1, 2)
    used = hold(held, 1, holders=2)
    news(held)
    assert held.unload(1, "v") == []
    with pytest.raises(AdapterNotFound):
        hold(held, 1)
    assert held.release(used) == []
    assert numbers(held) == [2, 1]
    assert held.release(used) == [used]
    assert numbers(held) == [2]
    assert held.used_bytes == SIZE
    assert news(held) == {1: ABSENT}
    assert held.evictions == 0


def test_adapter_loaded_again_before_its_last_holder_ends_stays() -> None:
    held = store()
    (known,) = filled(held, 1)
    hold(held, 1)
    held.unload(1, "")
    held.retain(known, pinned=False)
    assert held.release(known) == []
    assert hold(held, 1) is known


def test_unload_without_version_takes_all_of_the_number() -> None:
    held = store()
    both = [adapter(1, version=version) for version in "ab"]
    for each in both:
        held.put(each)
    filled(held, 2)
    assert held.unload(1, "") == both
    assert numbers(held) == [2]


def test_unload_of_an_unknown_adapter_is_reported() -> None:
    held = store()
    assert held.unload(7, "v") == []
    assert news(held) == {7: ABSENT}
    assert not held.has_news


def test_pins_leave_a_slot_to_sequences_with_others() -> None:
    held = store(slots=2)
    filled(held, 1, 2)
    used = hold(held, 2)
    held.retain(adapter_of(held, 1), pinned=True)
    with pytest.raises(AdaptersFull) as full:
        held.put(adapter(3, pinned=True))
    assert (full.value.field, full.value.limit_field) == (
        "adapter.id",
        "adapters.max_batch_adapters",
    )
    assert numbers(held) == [1, 2]
    held.release(used)
    held.put(adapter(3, pinned=True))
    with pytest.raises(AdaptersFull) as full:
        hold(held, 2)
    assert (full.value.field, full.value.value) == ("lora.id", "2")
    held.unload(3, "", unpin=True)
    assert hold(held, 2) is used


def test_unknown_version_is_refused_with_number_and_name() -> None:
    held = store()
    filled(held, 1)
    with pytest.raises(AdapterNotFound) as refused:
        held.hold(Lora(1, name="french", version="w"), 1)
    assert (refused.value.field, refused.value.value) == ("lora.id", "1")
    assert "'french'" in refused.value.problem


@pytest.mark.parametrize(
    ("asked", "field"), [(Lora(version="v"), "lora.id"), (Lora(1), "lora.version")]
)
def test_item_names_number_and_version(asked: Lora, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        store().hold(asked, 1)
    assert refused.value.field == field


def test_failure_has_the_place_and_hides_no_change() -> None:
    held = store(slots=1)
    first, _ = filled(held, 1, 2)
    held.take_news()
    first.place = epb.ADAPTER_PLACE_DEVICE
    held.note(first)
    held.failed(first.identity, AdaptersFull("none"))
    held.failed(Adapter(9, version="v"), AdaptersFull("none"))
    held.note(first)
    assert held.has_news
    told = [(each.adapter.id, each.place, each.error is None) for each in held.take_news()]
    device = epb.ADAPTER_PLACE_DEVICE
    # The first state answers the load.
    assert told == [(1, device, False), (9, ABSENT, False), (1, device, True)]
    assert not held.has_news


def test_later_success_replaces_a_failure() -> None:
    held = store()
    (first,) = filled(held, 1)
    held.failed(first.identity, AdaptersFull("none"))
    held.retain(first, pinned=False)
    held.failed(Adapter(2, version="v"), AdaptersFull("none"))
    held.put(adapter(2))
    assert [each.error for each in held.take_news()] == [None, None]


def test_sums_are_those_of_all_adapters_after_any_changes() -> None:
    chance = random.Random(7)
    held = store(adapters=12, slots=4)
    live: list[StoredAdapter] = []
    for _ in range(4000):
        number = chance.randrange(30)
        match chance.randrange(6):
            case 0 if held.get(number, "v") is None:
                with suppress(AdaptersFull):
                    held.put(adapter(number, pinned=chance.random() < 0.2))
            case 1:
                with suppress(AdapterNotFound, AdaptersFull):
                    live.append(hold(held, number))
            case 2 if live:
                held.release(live.pop(chance.randrange(len(live))))
            case 3:
                held.unload(number, chance.choice(["", "v"]))
            case 4:
                held.unload(number, chance.choice(["", "v"]), unpin=True)
            case 5 if kept := held.get(number, "v"):
                with suppress(AdaptersFull):
                    held.retain(kept, pinned=chance.random() < 0.5)
        each = held._held.values()
        idle = [a for a in each if not a.holders and not a.pinned]
        assert held._pins == sum(a.pinned for a in each)
        assert held._used == sum(a.holders > 0 and not a.pinned for a in each)
        assert held._idle_bytes == SIZE * len(idle)
        assert held.used_bytes == SIZE * len(each)
    assert held.evictions > 50


def test_an_item_costs_as_much_beside_ten_thousand_adapters() -> None:
    costs = []
    for count in (10, 10_000):
        held = store(adapters=count, slots=4)
        filled(held, *range(count))
        with counted_lines() as lines:
            held.release(hold(held, 5))
            held.put(adapter(count))
            held.retain(adapter_of(held, 3), pinned=True)
            held.unload(4, "v")
        costs.append(lines.count)
    few, many = costs
    assert few == many > 30
