"""The version for an item, and adapters that requests brought."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from counting import counted_lines
from router.adapters.contents_of import content, version_of
from small_disk import full_beyond
from trtmesh.chassis.adapter_content import AdapterContent, number_of
from trtmesh.chassis.errors import Exhausted
from trtmesh.chassis.vocabulary import Adapter, Lora, Tensor
from trtmesh.router.adapters import contents
from trtmesh.router.adapters.adapters import MOST_REMOVED, Adapters, ItemAdapter
from trtmesh.router.adapters.registry import Entry, Registration, Registry
from trtmesh.router.adapters.settings import AdapterSettings
from trtmesh.router.metrics import RouterMetrics
from trtmesh.v1 import generation_pb2 as pb

CONFIG = Tensor(pb.DATA_TYPE_INT32, (1, 3), bytes(12))


def adapters(**settings: object) -> Adapters:
    return Adapters(AdapterSettings.model_validate(settings), RouterMetrics())


def tensor(weights: bytes) -> Tensor:
    return Tensor(pb.DATA_TYPE_FP16, (1, len(weights) // 2), weights)


def version(weights: bytes) -> str:
    return AdapterContent.of_arrays(tensor(weights), CONFIG).version


async def bring(known: Adapters, number: int, weights: bytes, model: str = "m") -> ItemAdapter:
    found = await known.find(model, Lora(id=number, weights=tensor(weights), config=CONFIG), "r")
    assert found is not None
    return found


async def find(known: Adapters, number: int, model: str = "m") -> ItemAdapter | None:
    return await known.find(model, Lora(id=number), "r")


async def test_brought_adapter_is_found_by_model_and_number() -> None:
    known = adapters()
    brought = await bring(known, 7, b"ab")
    assert brought.identity == Adapter(7, "", version(b"ab"))
    assert await find(known, 7) == brought
    assert await find(known, 8) is None
    assert await find(known, 7, "another") is None
    assert await known.find("m", Lora(name="unnumbered"), "r") is None


async def test_new_weights_are_a_new_version_and_items_keep_theirs() -> None:
    known = adapters()
    old, new = await bring(known, 7, b"ab"), await bring(known, 7, b"cd")
    assert old.identity != new.identity
    assert await find(known, 7) == new
    assert (await known.content(old)).version == old.identity.version


async def test_weights_without_number_have_that_of_their_name_or_digest() -> None:
    known = adapters()
    named = Lora(name="a", weights=tensor(b"ab"), config=CONFIG)
    found = await known.find("m", named, "r")
    assert found is not None
    assert found.identity == Adapter(number_of("a"), "a", version(b"ab"))
    found = await known.find("m", Lora(weights=tensor(b"ab"), config=CONFIG), "r")
    assert found is not None
    assert found.identity == Adapter(number_of(version(b"ab")), "", version(b"ab"))


async def test_rank_is_known_before_a_worker_has_loaded_the_adapter(tmp_path: Path) -> None:
    known = adapters(directory=tmp_path)
    await known.upload(Registration("named", id=1), content(rank=24))
    config = Tensor(pb.DATA_TYPE_INT32, (1, 3), struct.pack("<3i", 1, 0, 16))
    brought = await known.find("m", Lora(id=3, weights=tensor(b"ab"), config=config), "r")
    assert brought is not None
    assert brought.rank == 16
    await known.close()
    restarted = adapters(directory=tmp_path)
    await restarted.refresh()
    for each in (known, restarted):
        found = [await find(each, number) for number in (1, 3)]
        assert [item.rank for item in found if item] == [24, 16]
    # The worker's own count wins: it may have joined updates.
    known.usages.of(brought.identity).rank = 48
    again = await find(known, 3)
    assert again is not None
    assert again.rank == 48


async def test_longest_unused_are_forgotten() -> None:
    known = adapters(bytes=2 * AdapterContent.of_arrays(tensor(b"ab"), CONFIG).size_bytes)
    for number, weights in ((1, b"ab"), (2, b"cd")):
        await bring(known, number, weights)
    await find(known, 1)
    await bring(known, 3, b"ef")
    assert [await find(known, number) is not None for number in (1, 2, 3)] == [True, False, True]


async def test_without_memory_an_item_still_gets_its_own_adapter() -> None:
    known = adapters(bytes=0)
    brought = await bring(known, 1, b"ab")
    assert (await known.content(brought)).version == version(b"ab")
    assert await find(known, 1) is None
    assert known.contents.memory.size_bytes == 0


async def test_newest_weights_of_a_number_reach_the_directory(tmp_path: Path) -> None:
    known = adapters(directory=tmp_path)
    weights = [bytes([n, 0]) for n in range(16)]
    brought = await asyncio.gather(*(bring(known, 7, each) for each in weights))
    newest = await find(known, 7)
    assert newest is not None
    assert newest.identity in [each.identity for each in brought]
    await known.close()
    again = adapters(directory=tmp_path)
    await again.refresh()
    found = await find(again, 7)
    assert found is not None
    assert found.identity == newest.identity
    assert (await again.content(found)).version == newest.identity.version


async def test_directory_that_cannot_be_written_bounds_memory_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    size = AdapterContent.of_arrays(tensor(b"ab"), CONFIG).size_bytes
    known = adapters(directory=tmp_path / "file", bytes=2 * size)
    for number in range(5):
        await bring(known, number, bytes([number, 0]))
        await known.close()
    assert known.contents.memory.size_bytes <= 2 * size
    assert await find(known, 4) is not None
    assert await find(known, 0) is None


async def test_slow_directory_bounds_memory_and_is_written_once_it_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, write = threading.Event(), contents.write_content

    def slow(file: Path, content: AdapterContent) -> None:
        gate.wait()
        write(file, content)

    monkeypatch.setattr(contents, "write_content", slow)
    size = AdapterContent.of_arrays(tensor(b"ab"), CONFIG).size_bytes
    known = adapters(directory=tmp_path, bytes=3 * size)
    try:
        for number in range(8):
            brought = await bring(known, number, bytes([number, 0]))
            assert (await known.content(brought)).version == brought.identity.version
            assert known.contents.memory.size_bytes <= 3 * size
    finally:
        gate.set()
    await known.close()
    # Weights that found no room are written when they come again.
    await bring(known, 7, b"\x07\x00")
    await known.close()
    again = adapters(directory=tmp_path)
    await again.refresh()
    assert [number for number in range(8) if await find(again, number)] == [0, 1, 2, 7]


@pytest.mark.parametrize("follow", ["", "127.0.0.1:1"])
async def test_number_of_brought_adapters_is_bounded(
    follow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trtmesh.router.adapters.adapters.MAX_BROUGHT", 2)
    known = adapters(follow=follow)
    for number in (1, 2):
        await bring(known, number, b"ab")
    await find(known, 1)
    await bring(known, 3, b"ab")
    assert [number for number in (1, 2, 3) if await find(known, number)] == [1, 3]
    assert len([*known.entries()]) == 2
    assert not known.removed, "workers may serve a forgotten adapter"


async def test_removed_versions_outlive_any_number_of_changes() -> None:
    known = adapters()
    await known.upload(Registration("a", id=1), content(b"old"))
    await known.upload(Registration("a", id=1), content(b"new"))
    key = (1, content(b"old").version)
    other = version_of(content(b"w"))
    entries = {
        ("m", n): Entry(n, "", "m", (replace(other, digest=f"{n:032x}"),), brought=True)
        for n in range(2, 2 * MOST_REMOVED)
    }
    known.take(Registry({**known.registry.entries, **entries}))
    assert [*known.removed] == [key]
    await known.upload(Registration("a", id=1), content(b"old"))
    assert [*known.removed] == [(1, content(b"new").version)]


async def test_registration_looks_at_no_more_than_a_bucket_of_ten_thousand_adapters() -> None:
    known, costs = adapters(), []
    for count in (10, 10_000):
        entries = [
            Entry(n, f"a{n}", "", (replace(version_of(content()), digest=f"{n:032x}"),))
            for n in range(1, count)
        ]
        known.take(Registry({entry.key: entry for entry in entries}))
        # The first change makes the index.
        await known.pin(1, pinned=True)
        with counted_lines() as lines:
            await known.upload(Registration(f"new{count}"), content(b"new%d" % count))
            await known.find("m", Lora(name=f"new{count}"), "r")
            await known.pin(number_of(f"new{count}"), pinned=True)
            await known.remove(number_of(f"new{count}"), "")
        costs.append(lines.count)
    few, many = costs
    # A bucket of eighty is compared.
    assert 1000 < many < 3 * few


async def test_registered_name_wins_over_a_brought_one() -> None:
    known = adapters()
    await known.find("m", Lora(id=7, name="a", weights=tensor(b"ab"), config=CONFIG), "r")
    await known.upload(Registration("a", id=8), content())
    found = await known.find("m", Lora(name="a"), "r")
    assert found is not None
    assert found.identity.id == 8


def files_in(directory: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}


@pytest.mark.parametrize("change", ["upload", "remove"])
async def test_full_disk_changes_nothing_and_is_named(tmp_path: Path, change: str) -> None:
    known = adapters(directory=tmp_path)
    await known.upload(Registration("a", id=1), content(b"old"))
    files = files_in(tmp_path)
    changes: dict[str, Callable[[], Awaitable[object]]] = {
        "upload": partial(known.upload, Registration("a"), content(b"new")),
        "remove": partial(known.remove, 1, ""),
    }
    with full_beyond(8), pytest.raises(Exhausted, match="File too large") as refused:
        await changes[change]()
    assert str(tmp_path) in refused.value.message
    assert files_in(tmp_path) == files
    found = await find(known, 1)
    assert found is not None
    assert found.identity.version == content(b"old").version
    await known.upload(Registration("a"), content(b"new"))
    await known.remove(1, "")
    await known.close()
