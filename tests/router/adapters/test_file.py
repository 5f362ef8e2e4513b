"""The registry's file."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from trtmesh.chassis.errors import InvalidField, Mismatch
from trtmesh.router.adapters.file import RegistryFile, dump, parse
from trtmesh.router.adapters.registry import (
    EMPTY,
    Entry,
    Registration,
    Registry,
    Version,
    add,
    bring,
    pin,
)

DIGEST = "0123456789abcdef0123456789abcdef"
VERSION = f'{{"version": "{DIGEST}", "format": "peft", "size_bytes": 1}}'
NUMBER = f'{{"revision": 1, "adapters": [{{"id": 8, "name": "7", "versions": [{VERSION}]}}]}}'
EXTRA = (
    f'{{"revision": 1, "adapters": [{{"id": 7, "name": "a", "more": 3, "versions": [{VERSION}]}}]}}'
)


def version(digest: str = DIGEST) -> Version:
    return Version(digest, 1, 10, "team/a")


def test_registry_is_read_as_it_was_written() -> None:
    registry = add(EMPTY, Registration("a", id=7, model="m", pinned=True), version())
    registry = add(registry, Registration("a", model="m", canary_share=0.25), version(DIGEST[::-1]))
    registry = bring(registry, Entry(8, "", "m", (Version(DIGEST, 2, 3, rank=16),), brought=True))
    assert parse(dump(registry)) == registry


def test_missing_file_is_an_empty_registry(tmp_path: Path) -> None:
    file = RegistryFile(tmp_path)
    assert file.read() == EMPTY
    assert file.signature() is None


def test_changes_of_two_routers_both_count(tmp_path: Path) -> None:
    def register(name: str) -> None:
        RegistryFile(tmp_path).change(lambda known: add(known, Registration(name), version()))

    threads = [threading.Thread(target=register, args=[f"a{n}"]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    registry = RegistryFile(tmp_path).read()
    assert {entry.name for entry in registry.entries.values()} == {f"a{n}" for n in range(8)}
    assert registry.revision == 8


def test_every_change_has_another_signature(tmp_path: Path) -> None:
    file = RegistryFile(tmp_path)
    file.change(lambda known: add(known, Registration("a", id=7), version()))
    before = file.signature()
    file.change(lambda known: pin(known, 7, pinned=True))
    assert file.signature() != before


def test_change_returns_its_own_signature(tmp_path: Path) -> None:
    file, other = RegistryFile(tmp_path), RegistryFile(tmp_path)
    _, signature = file.change(lambda known: add(known, Registration("a", id=7), version()))
    assert signature == file.signature()
    other.change(lambda known: pin(known, 7, pinned=True))
    assert signature != file.signature()


def test_refused_change_leaves_the_file(tmp_path: Path) -> None:
    file = RegistryFile(tmp_path)
    registry, _ = file.change(lambda known: add(known, Registration("a"), version()))

    def refuse(_: Registry) -> Registry:
        raise InvalidField("no")

    with pytest.raises(InvalidField):
        file.change(refuse)
    assert file.read() == registry
    assert sorted(each.name for each in tmp_path.iterdir()) == ["registry.json", "registry.lock"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"revision": 1}',
        '{"revision": 1, "adapters": [], "more": 1}',
        '{"revision": 1, "adapters": [{"id": 7, "name": "a", "versions": []}]}',
        EXTRA,
        NUMBER,
    ],
)
def test_invalid_file_is_named_and_not_overwritten(tmp_path: Path, text: str) -> None:
    (tmp_path / "registry.json").write_text(text)
    file = RegistryFile(tmp_path)
    with pytest.raises(Mismatch, match=r"registry\.json"):
        file.read()
    with pytest.raises(Mismatch, match=r"registry\.json"):
        file.change(lambda known: known)
    assert (tmp_path / "registry.json").read_text() == text
