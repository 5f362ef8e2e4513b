"""Directories for adapters' files, locked while their worker lives: a killed worker leaves its own behind, and the next
one in the same place removes it.

A lock is the kernel's: it ends with its process, however that ends, and counts between containers too, where process
ids mean nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "trtmesh-adapters-"
NEW_PREFIX = ".trtmesh-new-adapters-"
"""Of a directory that is not locked yet, and empty."""


class LockedFolder:
    """A new directory below `parent`, which no other worker removes."""

    def __init__(self, parent: Path) -> None:
        """Raises OSError."""
        new = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=parent))
        self._lock = _open(new)
        # A file system without locks refuses those of `remove_abandoned` too, which then removes nothing.
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under its name only when locked: another worker may look at any time.
        self.path = new.rename(parent / f"{PREFIX}{new.name.removeprefix(NEW_PREFIX)}")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: Path) -> None:
    """Removes the directories of this user's workers that are gone."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            lock = _open(path)
        except OSError:
            # Another user's, no directory, or just removed.
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            # Its worker lives.
            continue
        finally:
            os.close(lock)


def _open(directory: Path) -> int:
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
