"""Contents in memory, in files and below roots."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_constants import patch
from router.adapters.contents_of import content, version_of, write
from trtmesh.chassis.adapter_content import AdapterContent
from trtmesh.chassis.errors import (
    AdapterMismatch,
    InvalidField,
    InvalidRequest,
    NotFound,
    Unavailable,
)
from trtmesh.router.adapters import contents as module
from trtmesh.router.adapters.contents import Contents, Memory
from trtmesh.router.adapters.registry import Entry
from trtmesh.router.adapters.settings import AdapterSettings


def contents(**settings: object) -> Contents:
    return Contents(AdapterSettings.model_validate(settings))


def test_longest_unused_contents_leave_memory_except_held_ones() -> None:
    each = [content(bytes([n])) for n in range(4)]
    memory = Memory(3 * each[0].size_bytes)
    for one in each[:3]:
        memory.put(one.version, one)
    memory.get(each[0].version)
    memory.put(each[3].version, each[3])
    assert memory.shrink({each[1].version}.__contains__) == [each[2].version]
    assert memory.size_bytes == 3 * each[0].size_bytes
    assert memory.has_room(1, {each[1].version}.__contains__)
    assert not memory.has_room(2 * each[0].size_bytes + 1, {each[1].version}.__contains__)


async def test_stored_content_is_read_again(tmp_path: Path) -> None:
    whole = content(b"stored")
    await contents(directory=tmp_path).store(whole.version, whole)
    assert await contents(directory=tmp_path).load(7, version_of(whole)) == whole
    assert [file.name for file in (tmp_path / "contents").iterdir()] == [whole.version]


@pytest.fixture
def directory_of_all_users() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660), (0o077, 0o600)])
def test_umask_decides_who_may_read_a_file(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        module.replace_file(tmp_path / "file", b"a", b"b")
    finally:
        os.umask(before)
    assert (tmp_path / "file").read_bytes() == b"ab"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_content_whose_time_cannot_be_set_is_read_and_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, missing = content(b"shared"), content(b"missing")
    file = tmp_path / whole.version
    module.write_content(file, whole)
    before = file.stat()

    def refuse(path: Path) -> None:
        path.stat()
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "utime", refuse)
    assert module.read_content(file) == whole
    module.write_content(file, whole)
    # A file that is written again is a new one under the same name.
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    module.write_content(file.with_name(missing.version), missing)
    assert file.with_name(missing.version).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_content_of_another_user_is_read_and_not_written_again(
    directory_of_all_users: Path,
) -> None:
    whole = content(b"shared")
    file = directory_of_all_users / whole.version
    module.write_content(file, whole)
    file.chmod(0o644)
    os.seteuid(65534)
    try:
        assert module.read_content(file) == whole
        module.write_content(file, whole)
        with pytest.raises(Unavailable):
            module.write_content(file.with_name("other"), whole)
    finally:
        os.seteuid(0)
    assert [each.name for each in directory_of_all_users.iterdir()] == [whole.version]


async def test_hung_fetch_blocks_neither_memory_nor_other_fetches_and_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patch(monkeypatch, adapter_load_seconds=0.5)
    cached, quick, hung = content(b"cached"), content(b"quick"), content(b"hung")
    fetched = []

    async def fetch(_number: int, digest: str) -> AdapterContent:
        fetched.append(digest)
        await asyncio.sleep(0)
        if digest == hung.version:
            await asyncio.Event().wait()
        return quick

    known = Contents(AdapterSettings(), fetch)
    known.memory.put(cached.version, cached)
    waits = [asyncio.create_task(known.load(7, version_of(hung))) for _ in range(2)]
    await asyncio.sleep(0)
    assert await known.load(8, version_of(cached)) == cached
    both = await asyncio.gather(*(known.load(9, version_of(quick)) for _ in range(2)))
    assert both == [quick, quick]
    assert fetched == [hung.version, quick.version]
    for wait in waits:
        with pytest.raises(Unavailable):
            await wait


async def test_load_survives_one_of_those_that_wait() -> None:
    whole, arrived = content(), asyncio.Event()

    async def fetch(_number: int, _digest: str) -> AdapterContent:
        await arrived.wait()
        return whole

    known = Contents(AdapterSettings(), fetch)
    first, second = (asyncio.create_task(known.load(7, version_of(whole))) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    arrived.set()
    assert await second == whole


@pytest.mark.parametrize("damage", [b"", b"9", b"1 2 3 abcde", b"x 1 1 ab"])
async def test_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    whole = content()
    known = contents(directory=tmp_path)
    await known.store(whole.version, whole)
    file = tmp_path / "contents" / whole.version
    file.write_bytes(damage)
    with pytest.raises(AdapterMismatch) as refused:
        await known.load(7, version_of(whole))
    assert refused.value.value == str(file)


async def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as refused:
        await contents(directory=tmp_path).load(7, version_of(content()))
    assert str(tmp_path / "contents" / content().version) in str(refused.value)


async def test_source_is_a_directory_below_a_root(tmp_path: Path) -> None:
    write(tmp_path / "root" / "team" / "a", content())
    (tmp_path / "root" / "link").symlink_to(tmp_path / "root" / "team")
    known = contents(roots=f"{tmp_path / 'other'},{tmp_path / 'root'}")
    for source in ("team/a", "link/a"):
        assert await known.read_source(source) == (content(), content().version)


async def test_file_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    whole = content()
    file = tmp_path / "contents" / whole.version
    file.parent.mkdir()
    file.symlink_to(file.name)
    with pytest.raises(Unavailable) as refused:
        await contents(directory=tmp_path).store(whole.version, whole)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    "source", ["", ".", "a/..", "../outside", "/abs", "link", "missing", "x\0y"]
)
async def test_source_outside_the_roots_is_refused(tmp_path: Path, source: str) -> None:
    write(tmp_path / "outside", content())
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    if source == "/abs":
        source = str(tmp_path / "outside")
    with pytest.raises(InvalidField) as refused:
        await contents(roots=str(tmp_path / "root")).read_source(source)
    assert refused.value.fields == ("source",)


async def test_file_of_a_source_that_links_outside_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "root" / "a", content())
    (tmp_path / "secret").write_bytes(b"secret")
    weights = tmp_path / "root" / "a" / "adapter_model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidField):
        await contents(roots=str(tmp_path / "root")).read_source("a")


async def test_source_that_changed_is_refused_with_both_digests(tmp_path: Path) -> None:
    write(tmp_path / "a", content(b"old"))
    known = contents(roots=str(tmp_path))
    registered = version_of(content(b"old"), "a")
    assert await known.load(7, registered) == content(b"old")
    write(tmp_path / "a", content(b"new"))
    with pytest.raises(AdapterMismatch) as refused:
        await known.load(7, registered)
    assert refused.value.value == content(b"new").version
    assert refused.value.limit == content(b"old").version


async def test_source_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch(monkeypatch, max_adapter_bytes=100)
    write(tmp_path / "a", content(bytes(100)))
    with pytest.raises(InvalidRequest):
        await contents(roots=str(tmp_path)).read_source("a")


async def test_files_without_a_version_stay_for_running_items_only(tmp_path: Path) -> None:
    known = contents(directory=tmp_path)
    old, kept, fresh = content(b"old"), content(b"kept"), content(b"fresh")
    for each in (old, kept, fresh):
        await known.store(each.version, each)
    past = time.time() - module.KEPT_SECONDS - 60
    for each in (old, kept):
        os.utime(tmp_path / "contents" / each.version, (past, past))
    await known.forget({kept.version})
    left = {file.name for file in (tmp_path / "contents").iterdir()}
    assert left == {kept.version, fresh.version}


async def test_longest_unused_files_are_the_first_to_be_forgotten(tmp_path: Path) -> None:
    known = contents(directory=tmp_path)
    entries = []
    for number in range(3):
        each = content(bytes([number]))
        await known.store(each.version, each)
        os.utime(tmp_path / "contents" / each.version, (number, number))
        entries.append(Entry(number, "", "m", (version_of(each),), brought=True))
    await known.load(0, entries[0].current)
    size = entries[0].current.size_bytes
    assert await known.longest_unused(entries, 3 * size, 3) == []
    assert await known.longest_unused(entries, 2 * size, 3) == [entries[1]]
    assert await known.longest_unused(entries, 3 * size, 1) == [entries[1], entries[2]]
