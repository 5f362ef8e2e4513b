"""The registry's file: JSON, shared by the routers of a directory."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from trtmesh.chassis.adapter_content import is_number
from trtmesh.chassis.errors import Mismatch
from trtmesh.chassis.validation import problem_of
from trtmesh.router.adapters.contents import replace_file, unwritten
from trtmesh.router.adapters.registry import EMPTY, Entry, Registry, Version
from trtmesh.v1 import generation_pb2 as pb

Format = Literal["peft", "arrays"]
WORDS: Mapping[int, Format] = {
    pb.ADAPTER_FORMAT_PEFT: "peft",
    pb.ADAPTER_FORMAT_ARRAYS: "arrays",
}
FORMATS: Mapping[Format, int] = {word: number for number, word in WORDS.items()}

Signature = tuple[int, int, int]
"""Time, size and inode: a change replaces the file."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class VersionModel(_Model):
    version: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    format: Format
    size_bytes: Annotated[int, Field(ge=0)]
    source: str = ""
    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0


def _name(name: str) -> str:
    if is_number(name):
        raise ValueError(f"{name!r} is a number, not a name")
    return name


class AdapterModel(_Model):
    id: Annotated[int, Field(ge=0, lt=2**64)]
    name: Annotated[str, AfterValidator(_name)]
    model: str = ""
    versions: Annotated[tuple[VersionModel, ...], Field(min_length=1)]
    pinned: bool = False
    brought: bool = False


class RegistryModel(_Model):
    revision: Annotated[int, Field(ge=0)]
    adapters: tuple[AdapterModel, ...]


class RegistryFile:
    """Reads and changes the file. All methods block."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "registry.json"
        self._lock = directory / "registry.lock"

    def signature(self) -> Signature | None:
        """Differs after every change; None without a file. Raises Mismatch."""
        try:
            stat = self._file.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unreadable(error) from error
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def read(self) -> Registry:
        """The registry; empty without a file. Raises Mismatch for an invalid file."""
        try:
            return parse(self._file.read_bytes())
        except FileNotFoundError:
            return EMPTY
        except OSError as error:
            raise self._unreadable(error) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = "".join(f"{part}: " for part in (".".join(map(str, first["loc"])),) if part)
            raise Mismatch(
                f"{self._file} is not a registry of adapters: {where}{problem_of(first)}; mend it,"
                " or delete it to start without adapters"
            ) from error

    def change(self, changed: Callable[[Registry], Registry]) -> tuple[Registry, Signature | None]:
        """Applies a change to the newest registry, under a lock; returns the signature of this very change.

        Raises the change's error, Mismatch for an invalid file, or as `unwritten`.
        """
        try:
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            with self._lock.open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                registry = changed(self.read())
                replace_file(self._file, dump(registry))
                return registry, self.signature()
        except OSError as error:
            raise unwritten(self._file, error) from error

    def _unreadable(self, error: OSError) -> Mismatch:
        return Mismatch(f"{self._file} cannot be read: {error.strerror}")


def parse(data: bytes) -> Registry:
    """Raises ValidationError."""
    model = RegistryModel.model_validate_json(data)
    entries = map(_entry, model.adapters)
    return Registry({entry.key: entry for entry in entries}, model.revision)


def dump(registry: Registry) -> bytes:
    model = RegistryModel(
        revision=registry.revision, adapters=tuple(map(_adapter, registry.entries.values()))
    )
    return model.model_dump_json(indent=1, exclude_defaults=True).encode()


def _entry(model: AdapterModel) -> Entry:
    versions = tuple(
        Version(
            each.version,
            FORMATS[each.format],
            each.size_bytes,
            each.source,
            each.share,
            each.rank,
        )
        for each in model.versions
    )
    return Entry(model.id, model.name, model.model, versions, model.pinned, model.brought)


def _adapter(entry: Entry) -> AdapterModel:
    versions = tuple(
        VersionModel(
            version=each.digest,
            format=WORDS[each.format],
            size_bytes=each.size_bytes,
            source=each.source,
            share=each.share,
            rank=each.rank,
        )
        for each in entry.versions
    )
    return AdapterModel(
        id=entry.id,
        name=entry.name,
        model=entry.model,
        versions=versions,
        pinned=entry.pinned,
        brought=entry.brought,
    )
