"""The running stacks of this user: each writes where it is, and commands without an address look there.

A stack holds a lock on its file while it lives, however it ends: whoever can take the lock removes the file.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import IO

from trtmesh.chassis.addresses import DEFAULT_ADDRESS, DEFAULT_ADMIN_ADDRESS
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.tls.client import ClientTls

NETWORK = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True)
class RunningStack:
    router: str = DEFAULT_ADDRESS
    admin: str = DEFAULT_ADMIN_ADDRESS
    models: str = ""
    ca: str = ""
    network: int = 0
    """The network namespace; loopback addresses differ between namespaces."""
    pid: int = 0
    """The process that started the others; 0 if unknown."""

    def tls(self, asked: ClientTls | None) -> ClientTls | None:
        """Returns TLS as asked for, else with the stack's authority."""
        return asked or (ClientTls(Path(self.ca)) if self.ca else None)


class StackFile:
    """The file of a stack of this process."""

    def __init__(self, number: int, file: IO[str] | None) -> None:
        self._file = file
        self.prefix = f"s{number}-" if number > 1 else ""
        """Begins the names of the stack's processes, different for each of the user's stacks."""

    def write(self, stack: RunningStack) -> None:
        """Says where the stack is, once it serves."""
        if self._file is not None:
            self._file.write(json.dumps(asdict(stack)))
            self._file.flush()


@contextmanager
def stack_file() -> Iterator[StackFile]:
    """Yields the first free number and the file, for the length of the block. Without a place for files every stack
    counts as the first."""
    try:
        _folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        number, file = _claim(_folder())
    except (OSError, RuntimeError):
        yield StackFile(1, None)
        return
    with file:
        try:
            yield StackFile(number, file)
        finally:
            with suppress(OSError):
                Path(file.name).unlink()


def _claim(folder: Path) -> tuple[int, IO[str]]:
    for number in count(1):
        file = (folder / f"{number}.json").open("a")
        if _take(file):
            file.truncate(0)
            return number, file
        file.close()
    raise AssertionError("numbers do not end")


def _take(file: IO[str]) -> bool:
    """Takes the lock of a file whose stack has ended, unless somebody else does or removes the file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), Path(file.name).stat())
    except OSError:
        return False


def stack_meant(option: str) -> RunningStack:
    """Returns the user's only running stack, or else the default addresses. Raises SettingsError for several."""
    stacks = running_stacks()
    if len(stacks) > 1:
        told = "; ".join(f"{s.models}: router {s.router}, admin {s.admin}" for s in stacks)
        raise SettingsError(
            f"is not set, but {len(stacks)} stacks of yours run ({told}); name the address",
            setting=option,
        )
    return stacks[0] if stacks else RunningStack()


def running_stacks() -> list[RunningStack]:
    """Those of this user that serve here."""
    return list(_running())


def _running() -> Iterator[RunningStack]:
    """The stacks of this user that serve here; removes the files of others that have ended."""
    with suppress(OSError, RuntimeError):
        for path in sorted(_folder().glob("*.json")):
            with suppress(OSError, ValueError, TypeError), path.open("r+") as file:
                if _take(file):
                    path.unlink()
                    continue
                stack = RunningStack(**json.loads(file.read()))
                if stack.network == network():
                    yield stack


def network() -> int:
    return NETWORK.stat().st_ino if NETWORK.exists() else 0


def _folder() -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR")
    return Path(given or Path.home() / ".local" / "state") / "trtmesh" / "stacks"
