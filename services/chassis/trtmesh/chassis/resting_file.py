"""Files written by others, not to be read half-written."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, ...]
"""Device, inode, size and times of a file."""


class RestingFile:
    """Says when to read a file, or several that belong together, again: after a change, once all are the same at two
    looks.

    Make the object before the first reading, so that no change is missed.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._used = [*map(_stamp, paths)]

    def is_due(self) -> bool:
        """Looks at the files. May block, as any access to a file."""
        now = [*map(_stamp, self._paths)]
        due = now == self._seen and now != self._used
        self._seen = now
        if due:
            self._used = now
        return due


def _stamp(path: Path) -> Stamp | None:
    """Returns a value that changes with the file, or None if unreadable."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
