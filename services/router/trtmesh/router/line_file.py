"""A bounded file of lines, written off the event loop."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.errors import SettingsError
from trtmesh.chassis.logs import Occasionally
from trtmesh.chassis.metrics import COUNTER, Row, families

log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
WARNING_SECONDS = 60.0
"""Least time between two warnings about a full disk."""
PIECE_BYTES = 2**20
"""Bytes read at once in search of the end of the last line."""
MAX_BYTES = 256 * 2**20
"""Size of a file that replaces the one before."""
MOST_WAITING, MOST_WAITING_CHARACTERS = 20_000, 2**26
"""Queued lines, and their size; beyond them the oldest are lost and counted."""


class LineFile(Collector):
    """Appends lines to a file that no other process writes.

    At MAX_BYTES the file replaces `<file>.1`, so both together stay below twice that size. The file is locked, since
    two routers would tear each other's.
    """

    def __init__(self, file: Path, setting: str, content: str, mode: int = 0o666) -> None:
        """`content` names the lines in metrics; `mode` is that of a new file. Raises SettingsError, naming the setting,
        if the file is not writable, or another router's."""
        self._mode = mode
        self._output: FileIO | None = _first_opened(file, setting, mode)
        self._file = file
        self._content = content
        self._writing = threading.Lock()
        self._waiting: deque[str] = deque()
        self._waiting_characters = 0
        self._warn = Occasionally(log, WARNING_SECONDS)
        self.lost = 0
        self.written = 0

    def put(self, line: str) -> None:
        """Queues a line, without its end."""
        self._waiting.append(line)
        self._waiting_characters += len(line)
        while (
            len(self._waiting) > MOST_WAITING or self._waiting_characters > MOST_WAITING_CHARACTERS
        ):
            self._waiting_characters -= len(self._waiting.popleft())
            self.lost += 1

    async def run(self) -> None:
        """Writes until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                await asyncio.to_thread(self._write, self._taken())
        finally:
            self.flush()
            self.close()

    def close(self) -> None:
        """Gives the file up; a later `flush` opens it again."""
        if self._output is not None:
            self._output.close()
            self._output = None

    def flush(self) -> None:
        """Writes the queue. After an I/O error the lines are lost, counted and logged, and serving continues."""
        self._write(self._taken())

    def _taken(self) -> list[str]:
        lines = [*self._waiting]
        self._waiting.clear()
        self._waiting_characters = 0
        return lines

    def collect(self) -> Iterator[Metric]:
        """Runs in the thread of the metrics server."""
        yield from families(prefix_of(self._content), LINE_FILE_TABLE, self)

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        try:
            # The end of `run` may meet a thread that still writes.
            with self._writing:
                _append(self._current(), "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self.lost += len(lines)
            self._warn(
                "write",
                logging.WARNING,
                "cannot write %s to %s: %s; %d are lost so far",
                self._content,
                self._file,
                error,
                self.lost,
            )
        else:
            self.written += len(lines)

    def _current(self) -> FileIO:
        """The open file, after a rotation by size or by others. Raises OSError."""
        if self._output is not None and _is_open_at(self._file, self._output):
            if os.fstat(self._output.fileno()).st_size < MAX_BYTES:
                return self._output
            self._file.replace(self._file.with_name(self._file.name + ".1"))
        self.close()
        self._output = _opened(self._file, self._mode)
        return self._output


LINE_FILE_TABLE: tuple[Row[LineFile], ...] = (
    Row(COUNTER, "written", "Items written to the file."),
    Row(COUNTER, "lost", "Items lost before they were written to the file."),
)


def prefix_of(content: str) -> str:
    """What the metrics of a file begin with."""
    return f"trtmesh_router_{content}_"


def _first_opened(file: Path, setting: str, mode: int) -> FileIO:
    """Creates a missing file. Raises SettingsError."""
    try:
        if file.exists() and not file.is_file():
            raise SettingsError(f"is {str(file)!r}, not a regular file", setting=setting)
        return _opened(file, mode)
    except BlockingIOError:
        raise SettingsError(
            f"is {str(file)!r}, which another router writes; give each router a file of its own",
            setting=setting,
        ) from None
    except OSError as error:
        raise SettingsError(
            f"is {str(file)!r}, which is not writable: {error.strerror}", setting=setting
        ) from error


def _append(output: FileIO, data: bytes) -> None:
    """Writes whole lines, or none. Raises OSError."""
    before = os.fstat(output.fileno()).st_size
    try:
        if output.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        output.truncate(before)
        raise


def _drop_torn_line(output: FileIO) -> None:
    """Cuts a file back to its last whole line: a killed router may have left half a line."""
    size = end = os.fstat(output.fileno()).st_size
    while end:
        start = max(0, end - PIECE_BYTES)
        if (lines := os.pread(output.fileno(), end - start, start).rfind(b"\n") + 1) > 0:
            end = start + lines
            break
        end = start
    if end < size:
        output.truncate(end)


def _opened(file: Path, mode: int) -> FileIO:
    """Opens a file that no other process writes. Raises OSError."""
    output = FileIO(file, "a+", opener=partial(os.open, mode=mode))
    try:
        fcntl.flock(output, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _drop_torn_line(output)
    except OSError:
        output.close()
        raise
    return output


def _is_open_at(file: Path, output: FileIO) -> bool:
    """Whether nobody has moved or removed the file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(file.stat(), os.fstat(output.fileno()))
    return False
