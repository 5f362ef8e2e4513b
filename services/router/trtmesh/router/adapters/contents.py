"""The contents of adapters: in bounded memory, in files named by digest, and in directories below roots."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath

from trtmesh.chassis import adapter_content
from trtmesh.chassis.adapter_content import FILE_NAMES, AdapterContent
from trtmesh.chassis.errors import (
    AdapterMismatch,
    Exhausted,
    InvalidField,
    NotFound,
    TrtmeshError,
    Unavailable,
)
from trtmesh.router.adapters.registry import Entry, Version
from trtmesh.router.adapters.settings import AdapterSettings

KEPT_SECONDS = 3600.0
"""Life of a content file without a version: a running item may still take its version to another worker."""

LOAD_SECONDS = 30.0
"""Longest load of a content: half the time of a delivery. The other half is for the way to a worker."""

LOADS_AT_ONCE = 4
"""Most contents loaded at the same time, to bound memory."""

FetchContent = Callable[[int, str], Awaitable[AdapterContent]]
"""Fetches a version of a number from the followed router."""


class Memory:
    """Contents by digest, the longest unused first, in bounded memory."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._contents: OrderedDict[str, AdapterContent] = OrderedDict()
        self.size_bytes = 0

    def get(self, digest: str) -> AdapterContent | None:
        if (content := self._contents.get(digest)) is not None:
            self._contents.move_to_end(digest)
        return content

    def put(self, digest: str, content: AdapterContent) -> AdapterContent:
        """Keeps a content. Returns the kept object, so equal contents share memory."""
        if digest not in self._contents:
            self.size_bytes += content.size_bytes
        kept = self._contents.setdefault(digest, content)
        self._contents.move_to_end(digest)
        return kept

    def drop(self, digest: str) -> None:
        if (content := self._contents.pop(digest, None)) is not None:
            self.size_bytes -= content.size_bytes

    def shrink(self, is_held: Callable[[str], bool]) -> list[str]:
        """Drops the longest unused contents beyond the limit, except held ones; returns their digests."""
        dropped: list[str] = []
        excess = self.size_bytes - self._most_bytes
        for digest, content in self._contents.items():
            if excess <= 0:
                break
            if not is_held(digest):
                excess -= content.size_bytes
                dropped.append(digest)
        for digest in dropped:
            self.drop(digest)
        return dropped

    def has_room(self, size_bytes: int, is_held: Callable[[str], bool]) -> bool:
        """Whether a content fits into memory beside the held contents."""
        if self.size_bytes + size_bytes <= self._most_bytes:
            return True
        kept = sum(each.size_bytes for name, each in self._contents.items() if is_held(name))
        return kept + size_bytes <= self._most_bytes


class Contents:
    """Finds contents by version. Files are read, written and hashed off the event loop."""

    def __init__(self, settings: AdapterSettings, fetch: FetchContent | None = None) -> None:
        self._roots = [Path(root) for root in settings.roots]
        self._files = settings.directory / "contents" if settings.directory else None
        self._fetch = fetch
        self._loading = asyncio.Semaphore(LOADS_AT_ONCE)
        self._loads: dict[str, asyncio.Task[AdapterContent]] = {}
        self.memory = Memory(settings.bytes)

    @property
    def on_disk(self) -> bool:
        """Whether uploaded contents are stored in files."""
        return self._files is not None

    async def load(self, number: int, version: Version) -> AdapterContent:
        """The content of a version, loaded once however many wait. Raises as `_load`, or Unavailable after a time."""
        if (known := self.memory.get(version.digest)) is not None:
            return known
        if (task := self._loads.get(version.digest)) is None:
            task = asyncio.create_task(self._load_in_time(number, version))
            self._loads[version.digest] = task
            task.add_done_callback(partial(self._loaded, version.digest))
        return await asyncio.shield(task)

    def _loaded(self, digest: str, task: asyncio.Task[AdapterContent]) -> None:
        del self._loads[digest]
        if not task.cancelled():
            # Retrieved here, because nothing may wait any more.
            task.exception()

    async def _load_in_time(self, number: int, version: Version) -> AdapterContent:
        try:
            async with asyncio.timeout(LOAD_SECONDS), self._loading:
                return await self._load(number, version)
        except TimeoutError as error:
            where = "the followed router (router.adapters.follow)" if self._fetch else "disk"
            raise Unavailable(
                f"adapter {number} did not arrive from {where} within {LOAD_SECONDS:g} s"
            ) from error

    async def _load(self, number: int, version: Version) -> AdapterContent:
        """Raises AdapterMismatch, NotFound or the followed router's error."""
        if self._fetch is not None:
            return await self._fetch(number, version.digest)
        if version.source:
            content, digest = await self.read_source(version.source)
            if digest != version.digest:
                raise _changed(version, digest)
            return content
        if self._files is None:
            raise NotFound(f"the content of version {version.digest} is not in memory any more")
        return await asyncio.to_thread(read_content, self._files / version.digest)

    async def close(self) -> None:
        """Ends the loads."""
        loads = [*self._loads.values()]
        for task in loads:
            task.cancel()
        await asyncio.gather(*loads, return_exceptions=True)

    async def store(self, digest: str, content: AdapterContent) -> None:
        """Writes a content to its file, if there is a directory. Raises as `unwritten`."""
        if self._files is not None:
            await asyncio.to_thread(write_content, self._files / digest, content)

    async def read_source(self, source: str) -> tuple[AdapterContent, str]:
        """Content and digest of a directory below a root. Raises InvalidField, NotFound or InvalidRequest."""
        return await asyncio.to_thread(self._read_source, source)

    async def forget(self, referenced: Collection[str]) -> None:
        """Removes files of unreferenced versions, some time after the last use."""
        if self._files is not None:
            await asyncio.to_thread(_sweep, self._files, referenced)

    async def longest_unused(
        self, entries: Sequence[Entry], most_bytes: int, most: int
    ) -> list[Entry]:
        """Returns the entries to forget, so at most `most` stay, with files of at most `most_bytes`."""
        if self._files is None:
            return []
        return await asyncio.to_thread(_longest_unused, self._files, entries, most_bytes, most)

    def _read_source(self, source: str) -> tuple[AdapterContent, str]:
        most = adapter_content.MAX_ADAPTER_BYTES
        content = AdapterContent.read(locate(self._roots, source), most)
        return content, content.version


def locate(roots: Sequence[Path], source: str) -> Path:
    """Returns the directory of a source. Raises InvalidField unless the directory and all files are below one of
    `roots`."""
    path = PurePosixPath(source)
    if source and not path.is_absolute() and ".." not in path.parts and "\0" not in source:
        for root in roots:
            top, found = root.resolve(), (root / path).resolve()
            if found != top and found.is_dir() and _is_below(top, found):
                return found
    known = ", ".join(map(str, roots)) or "none is configured"
    limit = f"a directory below a root, without '..' (router.adapters.roots: {known})"
    raise InvalidField.of("source", source, limit)


def _is_below(top: Path, directory: Path) -> bool:
    """Whether a directory and its files, links followed, are below `top`."""
    files = [directory / name for names in FILE_NAMES.values() for name in names]
    return all(path.resolve().is_relative_to(top) for path in (directory, *files))


def _changed(version: Version, digest: str) -> TrtmeshError:
    return AdapterMismatch(
        f"{version.source!r} changed on disk: its content is {digest} but the registered version is {version.digest};"
        " add it as a new version",
        field="source",
        value=digest,
        limit=version.digest,
    )


def write_content(file: Path, content: AdapterContent) -> None:
    """Writes the bytes covered by the digest, so the digest of the file is the name. Raises as `unwritten`."""
    try:
        with suppress(FileNotFoundError):
            _touch(file)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, content.header, content.config, content.weights)
    except OSError as error:
        raise unwritten(file, error) from error


def unwritten(file: Path, error: OSError) -> TrtmeshError:
    """Returns the error of an unchanged file: Exhausted for want of room, or else Unavailable."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    problem = f"{file} cannot be written, and nothing was changed: {error.strerror}"
    return (Exhausted if full else Unavailable)(f"{problem} (errno {error.errno})")


def replace_file(file: Path, *parts: bytes) -> None:
    """Writes a file under a temporary name and renames the file: readers see the old content or the whole new content.

    The umask decides who may read the file: routers of several users may share the directory.
    """
    temporary = file.with_name(f".part-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as written:
            for part in parts:
                written.write(part)
            written.flush()
            os.fsync(written.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _touch(file: Path) -> None:
    """Notes the last use of a file. Raises OSError for a missing or unreachable file."""
    try:
        os.utime(file)
    except PermissionError:
        # The file of another user keeps its time.
        file.stat()


def read_content(file: Path) -> AdapterContent:
    """Raises NotFound, Unavailable, or AdapterMismatch if the content is not that of the file's name."""
    try:
        data = file.read_bytes()
        _touch(file)
    except OSError as error:
        unread = NotFound if isinstance(error, FileNotFoundError) else Unavailable
        raise unread(f"{file} cannot be read: {error.strerror}") from error
    with suppress(ValueError):
        kind, config, weights, rest = data.split(b" ", 3)
        size = int(config)
        content = AdapterContent(int(kind), rest[:size], rest[size:])
        if int(weights) == len(content.weights) and content.version == file.name:
            return content
    raise AdapterMismatch(
        f"{file} is damaged: its content is not that of its name; add the adapter again",
        value=str(file),
    )


def _sweep(files: Path, referenced: Collection[str]) -> None:
    oldest = time.time() - KEPT_SECONDS
    for file in [*files.glob("*")] if files.is_dir() else []:
        with suppress(FileNotFoundError):
            if file.name not in referenced and file.stat().st_mtime < oldest:
                file.unlink()


def _longest_unused(
    files: Path, entries: Sequence[Entry], most_bytes: int, most: int
) -> list[Entry]:
    def used_at(entry: Entry) -> float:
        with suppress(OSError):
            return (files / entry.current.digest).stat().st_mtime
        return 0.0

    left = sum(entry.current.size_bytes for entry in entries)
    forgotten: list[Entry] = []
    for entry in sorted(entries, key=used_at):
        if left <= most_bytes and len(entries) - len(forgotten) <= most:
            break
        left -= entry.current.size_bytes
        forgotten.append(entry)
    return forgotten
