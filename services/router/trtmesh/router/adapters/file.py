"""The registry's file: JSON, shared by the routers of a directory."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError
from trtmesh.chassis.errors import Mismatch
from trtmesh.chassis.validation import problem_of
from trtmesh.router.adapters.contents import replace_file, unwritten
from trtmesh.router.adapters.registry import EMPTY, IN_FILE, Entry, Registry

Signature = tuple[int, int, int]
"""Time, size and inode: a change replaces the file."""


class RegistryModel(BaseModel):
    model_config = IN_FILE

    revision: Annotated[int, Field(ge=0)]
    adapters: tuple[Entry, ...]


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
    return Registry({entry.key: entry for entry in model.adapters}, model.revision)


def dump(registry: Registry) -> bytes:
    model = RegistryModel(revision=registry.revision, adapters=tuple(registry.entries.values()))
    return model.model_dump_json(indent=1, exclude_defaults=True, by_alias=True).encode()
