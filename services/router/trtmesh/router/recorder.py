"""Writes arrivals and their placements to a bounded file, off the event loop."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from trtmesh.chassis.errors import SettingsError, TrtmeshError
from trtmesh.chassis.logs import Occasionally
from trtmesh.chassis.settings import Settings
from trtmesh.router.placement.place import DecisionRecord
from trtmesh.router.values.request import GenerationRequest

log = logging.getLogger(__name__)

SETTING = "router.record.file"
FLUSH_SECONDS = 1.0
WARNING_SECONDS = 60.0
"""Least time between two warnings about a full disk."""
MOST_LINE_BYTES = 2**22
"""Bytes at the end of a file in which its last line begins."""
MOST_WAITING = 20_000
"""Queued lines; beyond this number the oldest are lost and counted."""


@dataclass(frozen=True, slots=True)
class RecordedItem:
    """A finished item."""

    request_id: str
    batch_index: int
    model: str
    arrival_time: float
    """Time of the event loop."""
    error: str
    """Reason word of a failed item, else ''."""
    prompt_tokens: int | None
    """None for a text without ids."""
    new_tokens: int | None = None
    """None without a worker."""
    first: DecisionRecord | None = None
    """The first placement, if any."""
    block_tokens: int = 1
    hashes: Sequence[int] = ()


MAX_BYTES = 256 * 2**20
"""Size of a file that replaces the one before."""


class RecordSettings(Settings):
    """Recorded traffic, for `trtmesh replay`."""

    file: Path | None = None
    """File for a line per finished item, with block hashes instead of the prompt; unset records nothing. Each router
    needs its own; `trtmesh up` adds the name to that of further routers (`trace.router-1.jsonl`). At 256 MiB it
    replaces `<file>.1`."""


class Recorder(Collector):
    """Writes one line per finished item: block hashes instead of the prompt.

    At `max_bytes` the file replaces `<file>.1`, so both together stay below twice that size. The file is locked, since
    two routers would tear each other's. Raises SettingsError if it is not writable, or another router's.
    """

    def __init__(self, file: Path, max_bytes: int = MAX_BYTES) -> None:
        self._output: FileIO | None = _first_opened(file)
        self._file = file
        self._max_bytes = max_bytes
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._to_unix = time.time() - time.monotonic()
        self._warn = Occasionally(log, WARNING_SECONDS)
        self.lost = 0
        self.written = 0

    def note(self, item: RecordedItem) -> None:
        if len(self._waiting) == MOST_WAITING:
            self.lost += 1
        line = {
            "timestamp": round((item.arrival_time + self._to_unix) * 1000),
            "input_length": item.prompt_tokens,
            "output_length": item.new_tokens,
            "block_tokens": item.block_tokens,
            "hash_ids": [*item.hashes],
            "request_id": item.request_id,
            "batch_index": item.batch_index,
            "model": item.model,
            "error": item.error,
        }
        if item.first is not None:
            decision = item.first.decision
            line |= {
                "policy": decision.policy,
                "worker": decision.chosen.worker,
                "cause": item.first.cause,
                "cached_tokens": decision.cached_tokens,
            }
            if need := decision.query.adapter:
                name = need.adapter.name or str(need.adapter.id)
                line |= {"adapter": name, "adapter_rank": need.rank}
        self._waiting.append(json.dumps(line))

    def note_refused(self, request: GenerationRequest, model: str, error: TrtmeshError) -> None:
        """Notes every item of a request that admission refused."""
        now = asyncio.get_running_loop().time()
        for item in request.items:
            self.note(
                RecordedItem(
                    request_id=request.request_id,
                    batch_index=item.batch_index,
                    model=model,
                    arrival_time=now,
                    error=error.reason,
                    prompt_tokens=item.told_prompt_tokens,
                )
            )

    def collect(self) -> Iterator[Metric]:
        """Runs in the thread of the metrics server."""
        for name, text, value in (
            ("written", "Items written to the record file.", self.written),
            ("lost", "Items lost before they were written to the record file.", self.lost),
        ):
            yield CounterMetricFamily(f"trtmesh_router_records_{name}", text, value=value)

    async def run(self) -> None:
        """Writes until cancelled, and once more then."""
        try:
            while True:
                await asyncio.sleep(FLUSH_SECONDS)
                await asyncio.to_thread(self.flush)
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
        lines = [self._waiting.popleft() for _ in range(len(self._waiting))]
        if not lines:
            return
        try:
            _append(self._current(), "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self.lost += len(lines)
            self._warn(
                "write",
                logging.WARNING,
                "cannot write records to %s: %s; %d are lost so far",
                self._file,
                error,
                self.lost,
            )
        else:
            self.written += len(lines)

    def _current(self) -> FileIO:
        """The open file, after a rotation by size or by others. Raises OSError."""
        if self._output is not None and _is_open_at(self._file, self._output):
            if os.fstat(self._output.fileno()).st_size < self._max_bytes:
                return self._output
            self._file.replace(self._file.with_name(self._file.name + ".1"))
        self.close()
        self._output = _opened(self._file)
        return self._output


def _first_opened(file: Path) -> FileIO:
    """Creates a missing file. Raises SettingsError."""
    try:
        if file.exists() and not file.is_file():
            raise SettingsError(f"is {str(file)!r}, not a regular file", setting=SETTING)
        return _opened(file)
    except BlockingIOError:
        raise SettingsError(
            f"is {str(file)!r}, which another router writes; give each router a file of its own",
            setting=SETTING,
        ) from None
    except OSError as error:
        raise SettingsError(
            f"is {str(file)!r}, which is not writable: {error.strerror}", setting=SETTING
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
    size = os.fstat(output.fileno()).st_size
    start = max(0, size - MOST_LINE_BYTES)
    tail = os.pread(output.fileno(), size - start, start)
    if tail and not tail.endswith(b"\n"):
        output.truncate(start + tail.rfind(b"\n") + 1)


def _opened(file: Path) -> FileIO:
    """Opens a file that no other process writes. Raises OSError."""
    output = FileIO(file, "a+")
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
