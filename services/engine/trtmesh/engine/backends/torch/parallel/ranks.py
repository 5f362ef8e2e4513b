"""Starts the processes of the other ranks, sends them commands, and ends them. Each has a socket pair with the first
rank: commands go down, and a report comes up before a rank gives up. The end of either side, in any way, closes the
pair.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from trtmesh.chassis.errors import BackendFailed, ModelUnusable, SettingsError, StartupError
from trtmesh.engine.backends.torch.parallel.group import RankGroup, RankPlace, Store, open_store
from trtmesh.engine.backends.torch.settings import TorchSettings

log = logging.getLogger(__name__)

PROGRAM = "trtmesh.engine.backends.torch.follower"
STANDARD_ERROR = 2
END_SECONDS = 2.0
"""For ranks to end by themselves."""
CAUSE_SECONDS = 5.0
"""Until the end of a rank is known, after a failed operation."""
LOOK_SECONDS = 0.1
"""Between two looks whether all ranks live, until all have joined the group."""

Lost = Callable[[Exception], None]
"""Called once, on a separate thread, with the reason."""

REPORTED = {each.__name__: each for each in (ModelUnusable, SettingsError)}
"""Errors of a start, reported by a rank for all."""


@dataclass(frozen=True, slots=True)
class _Other:
    """A rank besides the first."""

    name: str
    process: subprocess.Popen[bytes]
    connection: Connection


class Ranks:
    """The other ranks, seen from the first."""

    def __init__(self, names: Sequence[str], model_dir: Path, settings: TorchSettings) -> None:
        """Starts a process for each device of `names` but the first, and waits for all. Raises StartupError where any
        ends."""
        self._lock = threading.Lock()
        # Guarded by `_lock`.
        self._losses: list[Exception] = []
        self._closing = False
        self._is_lost = threading.Event()
        self._lost: Lost | None = None
        self._is_watched = threading.Event()
        self._folder = TemporaryDirectory(prefix="trtmesh-ranks-")
        # Before any rank starts. With the GIL held, a FileStore opens a folder that is gone again and again, and reads
        # the rest of a record that a killed rank began for good.
        file = Path(self._folder.name) / "store"
        store = open_store(file, len(names))
        self._others: list[_Other] = []
        try:
            for rank in range(1, len(names)):
                task = {
                    "model_dir": str(model_dir),
                    "settings": settings.model_dump_json(),
                    "device": names[rank],
                    "rank": rank,
                    "ranks": len(names),
                    "store": str(file),
                }
                self._others.append(_start(f"rank {rank} on {names[rank]}", task))
            for other in self._others:
                _await(other)
            self.group = self._join(store, RankPlace(0, len(names)), torch.device(names[0]))
        except BaseException:
            self._end_others()
            raise
        for other in self._others:
            watching = threading.Thread(target=self._watch, args=(other,), name=other.name)
            watching.daemon = True
            watching.start()

    def _join(self, store: Store, place: RankPlace, device: torch.device) -> RankGroup:
        """Waits for the others on another thread: for an ended rank, gloo waits for minutes and NCCL for good. Raises
        StartupError where any ends before."""
        joined: Future[RankGroup] = Future()

        def join() -> None:
            try:
                joined.set_result(RankGroup(store, place, device))
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                joined.set_exception(error)

        threading.Thread(target=join, name="join-ranks", daemon=True).start()
        while not joined.done():
            self._check_living()
            wait((joined,), LOOK_SECONDS)
        if joined.exception():
            # Its connections fail before the end of a rank is known.
            ends_at = time.monotonic() + CAUSE_SECONDS
            while time.monotonic() < ends_at:
                self._check_living()
                time.sleep(LOOK_SECONDS)
        return joined.result()

    def _check_living(self) -> None:
        for other in self._others:
            if (status := other.process.poll()) is not None:
                raise StartupError(str(_loss(other, status)))

    def watch(self, lost: Lost) -> None:
        """Lets `lost` be called when a rank ends, or has ended already."""
        self._lost = lost
        self._is_watched.set()

    def tell(self, command: bytes) -> None:
        """Raises OSError where a rank has ended."""
        for other in self._others:
            other.connection.send_bytes(command)

    @property
    def loss(self) -> Exception | None:
        """Why the group is broken, once a rank has ended. Operations waiting for the rank on a GPU end only later, with
        any result."""
        return self._losses[0] if self._is_lost.is_set() else None

    def cause_of(self, error: Exception) -> Exception:
        """The end of a rank as the cause of a failed operation; `error` where none has ended."""
        if not isinstance(error, StartupError) and self._is_lost.wait(CAUSE_SECONDS):
            return self._losses[0]
        return error

    def close(self) -> None:
        """Ends the other ranks, and this rank's part of the group. Called by the computing thread."""
        self._end_others()
        self.group.close()

    def _end_others(self) -> None:
        with self._lock:
            self._closing = True
        self._is_watched.set()
        for other in self._others:
            other.connection.close()
        ends_at = time.monotonic() + END_SECONDS
        for other in self._others:
            try:
                other.process.wait(max(0.0, ends_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("%s did not end and is killed", other.name)
                other.process.kill()
                other.process.wait()
        self._folder.cleanup()

    def _watch(self, other: _Other) -> None:
        """Waits for the end of a rank. The first end without a report explains the reports of others."""
        status = other.process.wait()
        with self._lock:
            if self._closing:
                return
            loss, is_first = _loss(other, status), not self._losses
            self._losses.insert(0 if status < 0 else len(self._losses), loss)
            self._is_lost.set()
        log.error("%s", loss)
        self.group.abort()
        self._is_watched.wait()
        if is_first and self._lost:
            self._lost(loss)


def _start(name: str, task: dict[str, object]) -> _Other:
    ours, theirs = Pipe()
    with theirs:
        descriptor = theirs.fileno()
        # Standard output belongs to the announcement of the service.
        process = subprocess.Popen(  # noqa: S603 - this project, with a number
            [sys.executable, "-m", PROGRAM, str(descriptor)],
            stdin=subprocess.DEVNULL,
            stdout=STANDARD_ERROR,
            pass_fds=[descriptor],
        )
    ours.send_bytes(json.dumps(task).encode())
    return _Other(f"{name} (process {process.pid})", process, ours)


def _await(other: _Other) -> None:
    """Waits until a rank is about to join the group. Raises StartupError where the rank ends before."""
    try:
        other.connection.recv_bytes()
    except (EOFError, OSError):
        raise StartupError(str(_loss(other, other.process.wait()))) from None


def _loss(other: _Other, status: int) -> Exception:
    """Why a rank has ended."""
    report = {}
    with suppress(EOFError, OSError):
        if other.connection.poll():
            report = json.loads(other.connection.recv_bytes())
    if report.get("kind") in REPORTED:
        return REPORTED[report["kind"]](report["problem"], setting=report["setting"])
    if status < 0:
        return BackendFailed(f"{other.name} was killed by {signal.Signals(-status).name}")
    why = report.get("problem", "without a report")
    return BackendFailed(f"{other.name} ended with status {status}: {why}")
