"""Changes of the registry, and the choice of a version."""

from __future__ import annotations

from typing import Any

import pytest
from trtmesh.chassis.adapter_content import number_of
from trtmesh.chassis.errors import AlreadyExists, InvalidField, NotFound
from trtmesh.router.adapters.registry import (
    EMPTY,
    Entry,
    Registration,
    Registry,
    Version,
    add,
    bring,
    check_free,
    pin,
    remove,
    without,
)


def version(digest: str) -> Version:
    return Version(digest, 1, 10)


def added(registry: Registry, digest: str, name: str = "a", **asked: Any) -> Registry:
    return add(registry, Registration(name, **asked), version(digest))


def entry(registry: Registry, name: str = "a") -> Entry:
    found = registry.by_name("m", name)
    assert found is not None
    return found


def test_adapter_without_number_gets_that_of_its_name() -> None:
    registry = added(EMPTY, "v1")
    assert entry(registry).id == number_of("a")
    assert registry.by_id("any model", number_of("a")) == entry(registry)
    assert registry.revision == 1


def test_new_version_replaces_the_current_one_for_new_requests() -> None:
    registry = added(added(EMPTY, "v1"), "v2")
    assert [each.digest for each in entry(registry).versions] == ["v2"]
    assert entry(registry).pick("any").digest == "v2"


def test_canary_gets_its_share_and_each_request_one_version() -> None:
    registry = added(added(EMPTY, "v1"), "v2", canary_share=0.25)
    picks = {f"r{n}": entry(registry).pick(f"r{n}").digest for n in range(4000)}
    assert 900 < list(picks.values()).count("v2") < 1100
    assert picks == {name: entry(registry).pick(name).digest for name in picks}
    current, canary = entry(registry).versions
    assert (entry(registry).share_of(current), entry(registry).share_of(canary)) == (0.75, 0.25)


def test_canary_is_promoted_by_adding_its_content_without_a_share() -> None:
    registry = added(added(added(EMPTY, "v1"), "v2", canary_share=0.5), "v2")
    assert [(each.digest, each.share) for each in entry(registry).versions] == [("v2", 0.0)]


def test_canary_of_another_share_replaces_the_former_share() -> None:
    registry = added(added(EMPTY, "v1"), "v2", canary_share=0.5)
    registry = added(registry, "v2", canary_share=0.9)
    assert [each.share for each in entry(registry).versions] == [0.0, 0.9]


@pytest.mark.parametrize(
    ("digest", "share"), [("v1", 0.5), ("v3", 0.6)], ids=["current", "too much"]
)
def test_impossible_canary_is_refused(digest: str, share: float) -> None:
    registry = added(added(EMPTY, "v1"), "v2", canary_share=0.5)
    with pytest.raises(InvalidField) as refused:
        added(registry, digest, canary_share=share)
    assert refused.value.fields == ("canary_share",)


def test_canary_needs_a_current_version() -> None:
    with pytest.raises(InvalidField) as refused:
        added(EMPTY, "v1", canary_share=0.5)
    assert refused.value.fields == ("canary_share",)


def test_number_and_name_belong_together() -> None:
    registry = added(EMPTY, "v1", id=7)
    with pytest.raises(AlreadyExists):
        added(registry, "v2", name="b", id=7)
    with pytest.raises(InvalidField):
        added(registry, "v2", id=8)
    assert entry(added(registry, "v2")).id == 7


def test_model_of_a_name_stays() -> None:
    registry = added(EMPTY, "v1", model="m")
    with pytest.raises(InvalidField) as refused:
        added(registry, "v2", model="n")
    assert refused.value.fields == ("model",)
    assert registry.by_name("n", "a") is None


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (Registration(""), "name"),
        (Registration("a\n"), "name"),
        (Registration("a" * 257), "name"),
        (Registration("7"), "name"),
        (Registration("a", canary_share=0.0), "canary_share"),
        (Registration("a", canary_share=1.5), "canary_share"),
    ],
)
def test_invalid_registration_names_its_field(asked: Registration, field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        asked.check()
    assert refused.value.fields == (field,)


def test_only_a_canary_is_removed_alone() -> None:
    registry = added(added(EMPTY, "v1", id=7), "v2", canary_share=0.5)
    assert [v.digest for v in entry(remove(registry, 7, "v2")).versions] == ["v1"]
    with pytest.raises(InvalidField):
        remove(registry, 7, "v1")
    with pytest.raises(NotFound):
        remove(registry, 7, "v3")
    assert not remove(registry, 7).entries
    with pytest.raises(NotFound):
        remove(registry, 8)


def test_brought_adapter_gives_way_to_an_operators() -> None:
    brought = Entry(7, "a", "m", (version("b1"),), brought=True)
    registry = bring(EMPTY, brought)
    check_free(registry, "m", 7)
    registry = added(registry, "v1", id=7)
    assert [each.brought for each in registry.entries.values()] == [False]
    with pytest.raises(InvalidField) as refused:
        check_free(registry, "m", 7)
    assert refused.value.fields == ("lora.weights",)


def test_pinned_adapter_is_kept_and_so_no_longer_forgotten() -> None:
    registry = bring(EMPTY, Entry(7, "a", "m", (version("b1"),), brought=True))
    registry = pin(registry, 7, pinned=True)
    assert (entry(registry).pinned, entry(registry).brought) == (True, False)
    registry = pin(registry, 7, pinned=False)
    assert (entry(registry).pinned, entry(registry).brought) == (False, False)
    with pytest.raises(NotFound):
        pin(registry, 8, pinned=True)


def test_lookups_of_a_changed_registry_are_those_of_a_new_one() -> None:
    registry = EMPTY
    for n in range(6):
        registry = bring(
            registry, Entry(n % 4, f"a{n % 3}", "m", (version(f"v{n}"),), brought=True)
        )
    registry = pin(added(remove(registry, 2), "v9", name="a1", id=3), 1, pinned=True)
    new = Registry(registry.entries, registry.revision)
    assert {*registry.pinned} == {*new.pinned} != set()
    for n in range(10):
        assert {*registry.of_number(n)} == {*new.of_number(n)}
        assert {*registry.of_digest(f"v{n}")} == {*new.of_digest(f"v{n}")}
        assert registry.by_name("m", f"a{n}") == new.by_name("m", f"a{n}")


def test_difference_names_changed_lost_and_new_adapters() -> None:
    before = bring(bring(added(EMPTY, "v1"), Entry(1, "", "m", (version("v"),))), _brought(2))
    after = bring(without(before, [_brought(2)]), Entry(1, "", "m", (version("w"),)))
    after = bring(after, _brought(3))
    assert sorted(before.difference(after)) == [("m", 1), ("m", 2), ("m", 3)]
    assert before.difference(Registry(dict(before.entries))) == []


def _brought(number: int) -> Entry:
    return Entry(number, "", "m", (version("b"),), brought=True)
