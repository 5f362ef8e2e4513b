"""A process that has imported what a service imports, and forks into processes of the service.

`python fork_server.py SOCKET MODULE...` imports the modules, and takes connections to the listening socket. For every
message of a connection it forks a process that runs a module as `python -m` would. It starts no thread and no loop and
computes nothing, so a fork finds no lock held and no library set up. It ends with the last connection, and all that it
forked ends with it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from process_constants import Constants, set_constants
from reference_cycles import PLACE, watch

LONGEST_MESSAGE = 2**20
UNFIT = b"unfit"
"""The first message of a server that cannot fork; of others it is the pid."""

OF_STARTS = "sitecustomize"
"""The module that an interpreter imports when it starts."""

MARK, NO_MARK = "TESTED_COMMAND", "0" * 32
"""Variable marking all descendants of a command, even after a change of parent; its value in a server."""

_START_OF_ENVIRONMENT = 47
"""The field after the name in /proc/PID/stat."""
_SET_PARENT_DEATH_SIGNAL = 1
_SET_NAME = 15
LONGEST_NAME = 15
MALLOC_OPTIONS = {
    "MALLOC_ARENA_MAX": -8,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_TRIM_THRESHOLD_": -1,
}
"""Variables that glibc reads when a process is executed, and the options of its `mallopt`."""
SERVICES = ("trtmesh.router", "trtmesh.tokenizer", "trtmesh.engine", "trtmesh.cli.one_process")
"""Modules whose processes end as executed ones do: their libraries have threads and pools to take apart."""

_HELD_BACK = (signal.SIGINT, signal.SIGCHLD)


@dataclass(frozen=True)
class Job:
    """A message to the server: what a forked process runs."""

    module: str
    arguments: list[str]
    constants: Constants
    forks: bool
    """Whether services and helpers that it starts are forked too."""
    leads_session: bool
    leads_group: bool
    env: dict[str, str]
    directory: str
    path: list[str]
    """Directories to import from before those of the server."""


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    imports = tuple(sys.argv[2:])
    ending = Ending()
    # While the environment is that of the server.
    from forked_children import fork_children

    # Ctrl-C is meant for the tests.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    # Every service asks twice for its release: a tenth of its start.
    vars(metadata)["version"] = cache(metadata.version)
    metadata.version("trtmesh")
    for name in imports:
        importlib.import_module(name)
        # It runs again, as the main module.
        if name.endswith(".__main__"):
            del sys.modules[name]
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        # Such as builds of PyTorch for GPUs do. A fork would have neither the thread nor a lock that it holds.
        listener.accept()[0].send(UNFIT)
        return
    # Collections would otherwise copy every page that forked processes share.
    gc.collect()
    gc.freeze()
    if job := Server(listener).serve():
        set_constants(job.constants)
        if job.forks:
            fork_children(imports)
        if place := os.environ.get(PLACE):
            watch(place)
        # As for `python -m`, nothing has imported the main module.
        sys.modules.pop(job.module, None)
        with nullcontext() if job.module in SERVICES else ending.noted():
            runpy.run_module(job.module, run_name="__main__", alter_sys=True)


class Ending:
    """The end of a forked process, after its module and what that has registered for the exit. The interpreter would
    take apart all that was imported, and so copy every page that forked processes share."""

    def __init__(self) -> None:
        """Before imports: what is registered first runs last."""
        self._status: int | None = None
        atexit.register(self._end)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the exit status of the block."""
        try:
            yield
            self._status = 0
        except SystemExit as end:
            has_status = end.code is None or isinstance(end.code, int)
            self._status = int(end.code or 0) & 0xFF if has_status else 1
            raise
        except Exception:
            self._status = 1
            raise

    def _end(self) -> None:
        if self._status is not None:
            # The interpreter tries again, and tells what it cannot write.
            with suppress(OSError, ValueError):
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(self._status)


class Server:
    """Forks, and tells how forked processes ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections = list[socket.socket]()
        self._ends, self._end = os.pipe()
        for each in (self._ends, self._end):
            os.set_blocking(each, False)
        self._told: dict[int, int] = {}
        """The pipe that takes the status of each process."""

    def serve(self) -> Job | None:
        """Returns a job in each forked process, and None in the server, when the last connection closes."""
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._end)
        # Whoever starts the server has connected.
        self._accept()
        while self._connections:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            watched = [
                self._ends,
                self._listener.fileno(),
                *map(socket.socket.fileno, self._connections),
            ]
            ready, _, _ = select.select(watched, [], [])
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            if self._ends in ready:
                os.read(self._ends, 4096)
                self._reap()
            if self._listener.fileno() in ready:
                self._accept()
            for connection in self._connections:
                if connection.fileno() in ready and (job := self._answer(connection)):
                    return job
            self._connections = [each for each in self._connections if each.fileno() >= 0]
        return None

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._connections.append(connection)
        with suppress(ConnectionError):
            connection.send(str(os.getpid()).encode())

    def _answer(self, connection: socket.socket) -> Job | None:
        """Returns the job in the forked process."""
        message, files = b"", list[int]()
        with suppress(ConnectionError):
            message, files, _, _ = socket.recv_fds(connection, LONGEST_MESSAGE, 4)
        if not message:
            connection.close()
            return None
        return self._fork(connection, message, files)

    def _reap(self) -> None:
        for pid in [*self._told]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                told = self._told.pop(pid)
                with suppress(BrokenPipeError):
                    os.write(told, str(os.waitstatus_to_exitcode(status)).encode())
                os.close(told)

    def _fork(self, connection: socket.socket, message: bytes, files: list[int]) -> Job | None:
        """Returns the job in the forked process."""
        server = os.getpid()
        *files, told = files
        stands, standing = os.pipe()
        if pid := os.fork():
            self._told[pid] = told
            for each in (*files, standing):
                os.close(each)
            # Who knows the pid may freeze the process.
            os.read(stands, 1)
            os.close(stands)
            with suppress(ConnectionError):
                connection.send(str(pid).encode())
            return None
        # The server may be killed too.
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for each in (told, *self._told.values(), self._ends, self._end, stands):
            os.close(each)
        for socket_ in (self._listener, *self._connections):
            socket_.close()
        job = Job(**json.loads(message))
        _prctl(_SET_NAME, name_of(job.module).encode())
        _take(job, files)
        os.close(standing)
        return job


def name_of(module: str) -> str:
    """The name of a forked process: the end of its module's, as long as the kernel allows."""
    return module[-LONGEST_NAME:]


def _prctl(option: int, value: int | bytes) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


def _take(job: Job, files: list[int]) -> None:
    """Gives this process its standard files, environment, directory, arguments and signals."""
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(job.env)
    if mark := job.env.get(MARK):
        _show(mark)
    for name in MALLOC_OPTIONS.keys() & job.env.keys():
        assert ctypes.CDLL(None).mallopt(MALLOC_OPTIONS[name], int(job.env[name]))
    if job.leads_session:
        os.setsid()
    if job.leads_group:
        os.setpgid(0, 0)
    os.chdir(job.directory)
    # As `python -m` has it.
    sys.path[:1] = [job.directory, *job.path]
    sys.argv[1:] = job.arguments
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    if any(Path(each, f"{OF_STARTS}.py").exists() for each in job.path):
        # The server may have had one of its own.
        sys.modules.pop(OF_STARTS, None)
        importlib.import_module(OF_STARTS)


def _show(mark: str) -> None:
    """Marks this process for others, which see the variables that the server was executed with."""
    _, _, fields = Path("/proc/self/stat").read_text().rpartition(")")
    start = int(fields.split()[_START_OF_ENVIRONMENT])
    place = Path("/proc/self/environ").read_bytes().index(f"{MARK}={NO_MARK}".encode())
    assert len(mark) == len(NO_MARK)
    ctypes.memmove(start + place + len(f"{MARK}="), mark.encode(), len(mark))


if __name__ == "__main__":
    main()
