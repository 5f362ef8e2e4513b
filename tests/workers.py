"""Runs the files of tests in several processes: `pytest --workers=6`.

They are forked when all tests are collected, so that one process imports and collects for all. A worker that ends in a
test fails that test, and another one runs what the file has left.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest.capture import CaptureManager
from _pytest.tmpdir import TempPathFactory

Places = Sequence[int]
"""Tests, by their places among the collected ones."""


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
    workers = dict[Connection, Worker]()
    if terminal := session.config.pluginmanager.getplugin("terminalreporter"):
        # Reports of several files alternate.
        terminal.showfspath = False
    try:
        for number in range(min(count, len(files))):
            _add(workers, session, number, files.popleft())
        while workers:
            for connection in wait([*workers]):
                assert isinstance(connection, Connection)
                worker = workers[connection]
                try:
                    kind, told = connection.recv()
                except (EOFError, ConnectionError):
                    del workers[connection]
                    if left := worker.ended():
                        _add(workers, session, worker.number, left)
                    continue
                if kind == "starts":
                    worker.starts(told)
                elif kind == "asks":
                    worker.gets(files.popleft() if files else ())
                else:
                    worker.reports(told)
                _raise_if_stopped(session)
    finally:
        for worker in workers.values():
            worker.kill()


def _raise_if_stopped(session: pytest.Session) -> None:
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def _add(
    workers: dict[Connection, Worker],
    session: pytest.Session,
    number: int,
    file: Places,
) -> None:
    """Forks a worker. Does not return there."""
    ours, theirs = Pipe()
    if (pid := os.fork()) == 0:
        for each in (ours, *workers):
            each.close()
        _work(session, number, theirs, file)
    theirs.close()
    workers[ours] = Worker(session, number, pid, ours, deque(file))


@dataclass
class Worker:
    """A worker, as the process sees it that has forked it."""

    session: pytest.Session
    number: int
    _pid: int
    _connection: Connection
    _given: deque[int]
    """Tests that have not ended."""
    _running: int | None = None

    def starts(self, place: int) -> None:
        self._running = place

    def gets(self, file: Places) -> None:
        self._given += file
        self._connection.send(file)

    def reports(self, told: dict[str, Any]) -> None:
        config = self.session.config
        report = config.hook.pytest_report_from_serializable(config=config, data=told)
        config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown" and self._running is not None:
            self._given.remove(self._running)
            self._running = None

    def ended(self) -> Places:
        """Awaits the end; returns the tests that it has left."""
        _, status = os.waitpid(self._pid, 0)
        self._connection.close()
        if (place := self._running) is not None:
            self._given.remove(place)
            self._lost(self.session.items[place], os.waitstatus_to_exitcode(status))
        elif self._given and status:
            raise RuntimeError(
                f"worker {self.number} ended with {os.waitstatus_to_exitcode(status)}"
            )
        return [*self._given]

    def _lost(self, item: pytest.Item, status: int) -> None:
        report = pytest.TestReport(
            *(item.nodeid, item.location, {}, "failed"),
            longrepr=f"worker {self.number} ended with {status} in {item.nodeid}",
            when="call",
        )
        item.ihook.pytest_runtest_logreport(report=report)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._connection.close()


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
        # The other process ends as well.
        pass
    finally:
        # Such as the ends of the processes that forks.py has started.
        atexit._run_exitfuncs()
        os._exit(status)


def _become(config: pytest.Config, number: int, parent: Connection) -> None:
    """Gives this process what processes must not share: reports go to the other one."""
    plugins = config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(_Reports(config, parent))
    capture = plugins.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager)
    capture.stop_global_capturing()
    capture.start_global_capturing()
    temporary = vars(config)["_tmp_path_factory"]
    assert isinstance(temporary, TempPathFactory)
    own = temporary.getbasetemp() / f"worker{number}"
    own.mkdir(mode=0o700, exist_ok=True)
    temporary._basetemp = own
    random.seed()


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
