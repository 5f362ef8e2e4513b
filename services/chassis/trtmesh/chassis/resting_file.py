"""A file that others write, and that must not be read half-written."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, ...]
"""Device, inode, size and times of a file."""


class RestingFile:
    """Tells when a file is to be read again: once it has changed, and then rested from one look to the next.

    Make it before the first reading, so that no change is missed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = self._used = _stamp(path)

    def is_due(self) -> bool:
        """Looks at the file. May block, as any access to a file."""
        now = _stamp(self.path)
        due = now == self._seen and now != self._used
        self._seen = now
        if due:
            self._used = now
        return due


def _stamp(path: Path) -> Stamp | None:
    """Changes with the file; None for one that cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
