"""Runs the files of tests in several processes: `pytest --workers=6`.

They are forked when all tests are collected, so that one process imports and collects for all. A worker that ends in a
test fails that test, and another one runs what the file has left. A worker that ends in any other way, or not at all,
ends the run with an error. When a run is cut short, workers tear down their fixtures before they end.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import pytest
from _pytest.capture import CaptureManager
from _pytest.tmpdir import TempPathFactory

Places = Sequence[int]
"""Tests, by their places among the collected ones."""

LAST_SECONDS = 60.0
"""Longest that workers may take to end: after the last test of all, or when the run is cut short."""


class Hooks:
    def pytest_worker_begins(self) -> None:
        """Called in each worker before its first test."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="processes that run files of tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("workers")
    if session.testsfailed or session.config.option.collectonly or not count:
        return None
    run_in_workers(session, count)
    return True


def run_in_workers(session: pytest.Session, count: int) -> None:
    """Runs the collected tests; each file in one worker, in the order of collection."""
    paths = (group for _, group in groupby(enumerate(session.items), lambda each: each[1].path))
    files = deque[Places]([place for place, _ in group] for group in paths)
    workers = dict[int, Worker]()
    if terminal := session.config.pluginmanager.getplugin("terminalreporter"):
        # Reports of several files alternate.
        terminal.showfspath = False
    try:
        for number in range(min(count, len(files))):
            _add(workers, session, number, files.popleft())
        while workers:
            for worker in _ready(workers):
                for kind, told in worker.messages():
                    if kind == "starts":
                        worker.starts(told)
                    elif kind == "asks":
                        worker.gets(files.popleft() if files else ())
                    else:
                        worker.reports(told)
                    _raise_if_stopped(session)
                if worker.has_ended:
                    del workers[worker.number]
                    if left := worker.ended():
                        _add(workers, session, worker.number, left)
    finally:
        _end(workers.values())


def _ready(workers: Mapping[int, Worker]) -> list[Worker]:
    """Awaits a message or the end of a worker. Workers that have run all tests await each other."""
    idle = all(worker.is_done for worker in workers.values())
    handles: dict[object, Worker] = {
        each: worker for worker in workers.values() for each in worker.handles
    }
    files = [each for worker in workers.values() for each in worker.handles]
    ready = wait(files, LAST_SECONDS if idle else None)
    if not ready:
        raise RuntimeError(f"workers {[*workers]} do not end after the last test")
    return [*dict.fromkeys(handles[each] for each in ready)]


def _end(workers: Collection[Worker]) -> None:
    """Has workers tear down what they have set up, and kills those that take too long."""
    try:
        for worker in workers:
            worker.interrupt()
        until = monotonic() + LAST_SECONDS
        for worker in workers:
            wait([worker.end], max(0.0, until - monotonic()))
    finally:
        for worker in workers:
            worker.kill()


def _raise_if_stopped(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _add(
    workers: dict[int, Worker],
    session: pytest.Session,
    number: int,
    file: Places,
) -> None:
    """Forks a worker. Does not return there."""
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        ours.close()
        for worker in workers.values():
            worker.close()
        _work(session, number, theirs, file)
    theirs.close()
    workers[number] = Worker(session, number, pid, os.pidfd_open(pid), ours, deque(file))


@dataclass(eq=False)
class Worker:
    """A worker, as the process sees it that has forked it."""

    session: pytest.Session
    number: int
    _pid: int
    end: int
    """A file that is readable once the process has ended: what it has started may hold the connection open."""
    _connection: Connection
    _given: deque[int]
    """Tests that have not ended."""
    _running: int | None = None
    has_ended: bool = False
    """Whether there are no further messages."""

    @property
    def is_done(self) -> bool:
        """Whether it has run all that it was given, and there is no more."""
        return not self._given

    @property
    def handles(self) -> Sequence[Connection | int]:
        return self._connection, self.end

    def messages(self) -> Iterator[tuple[str, Any]]:
        """Yields what has arrived: all of it once the process has ended."""
        ended = bool(wait([self.end], 0))
        # An end in the middle of a message is an OSError.
        with suppress(EOFError, OSError):
            while self._connection.poll():
                yield self._connection.recv()
        self.has_ended = ended

    def starts(self, place: int) -> None:
        self._running = place

    def gets(self, file: Places) -> None:
        self._given += file
        # Whatever ends meanwhile leaves the file to another one.
        with suppress(ConnectionError):
            self._connection.send(file)

    def reports(self, told: dict[str, Any]) -> None:
        config = self.session.config
        report = config.hook.pytest_report_from_serializable(config=config, data=told)
        config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown" and self._running is not None:
            self._given.remove(self._running)
            self._running = None

    def ended(self) -> Places:
        """Returns the tests that it has left. Raises RuntimeError where no test has ended it, but not all have run."""
        status = self._reap()
        if (place := self._running) is not None:
            self._given.remove(place)
            self._lost(self.session.items[place], status)
        elif self._given or status:
            raise RuntimeError(f"worker {self.number} ended with {status} between two tests")
        return [*self._given]

    def _lost(self, item: pytest.Item, status: int) -> None:
        report = pytest.TestReport(
            *(item.nodeid, item.location, {}, "failed"),
            longrepr=f"worker {self.number} ended with {status} in {item.nodeid}",
            when="call",
        )
        item.ihook.pytest_runtest_logreport(report=report)

    def interrupt(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.end, signal.SIGINT)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.end, signal.SIGKILL)
        self._reap()

    def _reap(self) -> int:
        """Awaits the end; returns the status."""
        _, status = os.waitpid(self._pid, 0)
        self.close()
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        self._connection.close()
        os.close(self.end)


def _work(
    session: pytest.Session,
    number: int,
    parent: Connection,
    file: Places,
) -> None:
    """Runs tests to the end of this process."""
    status = 1
    try:
        _become(session.config, number, parent)
        session.config.hook.pytest_worker_begins()
        _run(session, parent, file)
        status = 0
    except (KeyboardInterrupt, pytest.exit.Exception, ConnectionError):
        # The other process ends as well, and may ask for it once more.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        session._setupstate.teardown_exact(None)
    except Exception:  # noqa: BLE001 - another process tells of it
        _capture(session.config).stop_global_capturing()
        traceback.print_exc()
    finally:
        try:
            # Such as the ends of the processes that forks.py has started.
            atexit._run_exitfuncs()
        finally:
            os._exit(status)


def _become(config: pytest.Config, number: int, parent: Connection) -> None:
    """Gives this process what processes must not share: reports go to the other one."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Reports(config, parent))
    capture = _capture(config)
    capture.stop_global_capturing()
    capture.start_global_capturing()
    temporary = vars(config)["_tmp_path_factory"]
    assert isinstance(temporary, TempPathFactory)
    own = temporary.getbasetemp() / f"worker{number}"
    own.mkdir(mode=0o700, exist_ok=True)
    temporary._basetemp = own
    random.seed()


def _capture(config: pytest.Config) -> CaptureManager:
    capture = config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    return capture


class _Reports:
    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self._config, self._parent = config, parent

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook.pytest_report_to_serializable
        self._parent.send(("reports", hook(config=self._config, report=report)))


def _run(session: pytest.Session, parent: Connection, file: Iterable[int]) -> None:
    """Asks for the next file before the last test of one: what both use stays."""
    waiting = deque(file)
    while waiting:
        place = waiting.popleft()
        if not waiting:
            parent.send(("asks", None))
            waiting += parent.recv()
        item = session.items[place]
        following = session.items[waiting[0]] if waiting else None
        parent.send(("starts", place))
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
