"""Service processes without their imports: one process of each kind imports, for all workers of a run, and forks into
the others.

A `Forked` is a process like every other `subprocess.Popen`, with its own environment, files, sockets and signals. It
dies with the last worker.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import inspect
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import psutil
from fork_server import LONGEST_MESSAGE, MALLOC_OPTIONS, MARK, NO_MARK, OF_STARTS, UNFIT, Job
from process_constants import Constants

SERVER = Path(__file__).with_name("fork_server.py")
WITH_CONSTANTS = Path(__file__).with_name("process_constants.py")
NO_CONSTANTS: Constants = {}

PLACE = "TESTED_FORKS"
"""Variable with the directory of the sockets. Workers have that of the run."""

OF_IMPORTS = ("GRPC_", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR")
"""Set in this process by what tests import, and alike by the same imports elsewhere."""
LATE = (
    *("TRTMESH_", "TRTLLM_STAND_IN_", "AIP_", "SAGEMAKER_", "PYTEST_"),
    *("COLUMNS", "XDG_RUNTIME_DIR", "TESTED_", "FAKE_"),
    # Of a shell that completes a command.
    *("_TRTMESH_", "COMP_"),
    # Read where one of them names a collector.
    "OTEL_",
    *OF_IMPORTS,
    # The server tells them to glibc.
    *MALLOC_OPTIONS,
)
"""Prefixes of variables that nothing reads before a service or a command runs. The interpreter and libraries read
others when they start."""


def early(env: Mapping[str, str]) -> Mapping[str, str]:
    """The variables that a process must have when it imports."""
    return {name: value for name, value in env.items() if not name.startswith(LATE)}


EARLY = early(os.environ)
"""Of the processes that import."""

PATH = "PYTHONPATH"


def is_like_ours(env: Mapping[str, str]) -> bool:
    """Whether processes with these variables import what ours do: directories that they have besides change nothing."""
    added = added_directories(env)
    is_alike = {**early(env), PATH: ""} == {**EARLY, PATH: ""}
    return is_alike and added is not None and not any(map(changes_imports, added))


def added_directories(env: Mapping[str, str]) -> list[str] | None:
    """Directories that processes with these variables import from before ours; None where they lack some of ours."""
    ours, given = (
        [each for each in variables.get(PATH, "").split(os.pathsep) if each]
        for variables in (EARLY, env)
    )
    added = len(given) - len(ours)
    return given[:added] if added >= 0 and given[added:] == ours else None


def changes_imports(directory: str) -> bool:
    """Whether a directory has a module that this process would find elsewhere. A forked process imports one of a start
    like an executed one."""
    with suppress(FileNotFoundError):
        names = {each.stem for each in Path(directory).iterdir()} - {"__pycache__", OF_STARTS}
        return any(map(PathFinder.find_spec, names))
    return False


_known: list[ForkServer] = []


@atexit.register
def _leave() -> None:
    """Closes all before it waits for one: another worker, which that one waits for, may wait for these."""
    for server in _known:
        server.close()
    for server in _known:
        server.wait()


class NotRunning(Exception):
    """A server has not been started."""


class ForkServer:
    """A connection to the process of `fork_server.py` that has done some imports. The first one starts it."""

    def __init__(self, imports: Sequence[str], *, may_start: bool = True) -> None:
        """Raises NotRunning where it runs nowhere and may not be started."""
        self._imports, self._may_start = imports, may_start
        key = json.dumps([*imports, sorted(EARLY.items())]).encode()
        self._path = f"{os.environ[PLACE]}/{hashlib.sha256(key).hexdigest()[:16]}"
        self._process: subprocess.Popen[bytes] | None = None
        """Where this process started it."""
        self._connection = self._connected()
        self._asking = threading.Lock()
        self.is_fit = True
        """Whether it forks: not where an import has started a thread. Known when it is ready."""
        self._pid = 0
        self._forked = set[int]()
        _known.append(self)

    def _connected(self) -> socket.socket:
        with Path(f"{self._path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(self._path)
            except (FileNotFoundError, ConnectionRefusedError):
                if not self._may_start:
                    connection.close()
                    raise NotRunning from None
                Path(self._path).unlink(missing_ok=True)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(self._path)
                    listener.listen()
                    connection.connect(self._path)
                    self._process = self._start(listener.fileno())
            return connection

    def _start(self, listener: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, SERVER, str(listener), *self._imports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**EARLY, MARK: NO_MARK},
            pass_fds=[listener],
        )

    @property
    def pid(self) -> int:
        """The parent of the forked processes, known when it is ready."""
        return self._pid

    def wait_ready(self) -> None:
        """Waits for the end of the imports."""
        with self._asking:
            while self.is_fit and not self._pid:
                try:
                    told = self._answer()
                except ConnectionError:
                    if self._process:
                        raise self.lost() from None
                    # It ended with the last connection before, or with an import that fails here too.
                    self._connection.close()
                    self._connection = self._connected()
                else:
                    self.is_fit = told != UNFIT
                    self._pid = int(told) if self.is_fit else 0
            if not self.is_fit:
                self.wait()

    def children(self) -> list[psutil.Process]:
        """The living processes that this process has had forked."""
        if not self._pid:
            return []
        children = psutil.Process(self._pid).children()
        return [each for each in children if each.pid in self._forked]

    def fork(self, job: Job, files: Sequence[int]) -> int:
        """Forks a process with these standard files; the last one takes its status. Returns its pid."""
        self.wait_ready()
        message = json.dumps(asdict(job)).encode()
        assert len(message) < LONGEST_MESSAGE
        with self._asking:
            try:
                socket.send_fds(self._connection, [message], files)
                pid = int(self._answer())
            except ConnectionError:
                raise self.lost() from None
            self._forked.add(pid)
            return pid

    def lost(self) -> RuntimeError:
        """Waits for the end of the server, which has closed what it had open, where this process started it."""
        status = f" with {self._process.wait()}" if self._process else ""
        return RuntimeError(f"the fork server ended{status}")

    def _answer(self) -> bytes:
        if answer := self._connection.recv(LONGEST_MESSAGE):
            return answer
        raise ConnectionResetError

    def close(self) -> None:
        self._connection.close()

    def wait(self) -> None:
        """Waits for the end of the server where this process started it: other workers may need it longer."""
        if self._process:
            self._process.wait()


@cache
def fork_server(imports: tuple[str, ...]) -> ForkServer:
    """The server with these imports, started when it is first asked for."""
    return ForkServer(imports)


def start_module(
    server: ForkServer,
    module: str,
    arguments: Sequence[str],
    env: Mapping[str, str],
    constants: Constants = NO_CONSTANTS,
    *,
    forks: bool = False,
    **options: Any,
) -> subprocess.Popen[Any]:
    """Starts `python -m MODULE ARGUMENTS`, with pipes unless `options` have files: forked, unless a variable must be
    there when it imports or the imports start threads. A forked one `forks` services that it starts."""
    server.wait_ready()
    options = {
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        **options,
        "env": env,
    }
    if server.is_fit and is_like_ours(env):
        return Forked(server, module, arguments, constants, forks=forks, **options)
    main = ["-m"] if not constants else [str(WITH_CONSTANTS), json.dumps(constants)]
    return subprocess.Popen([sys.executable, *main, module, *arguments], **options)


_POPEN: Any = subprocess.Popen
EXECUTE, CLOSE_PIPES = _POPEN._execute_child, _POPEN._close_pipe_fds
"""Its stubs leave the privates out."""


class Forked(subprocess.Popen[Any]):
    """`python -m MODULE ARGUMENTS`, forked from a process that has done the imports, which is its parent."""

    def __init__(
        self,
        server: ForkServer,
        module: str,
        arguments: Sequence[str],
        constants: Constants = NO_CONSTANTS,
        *,
        forks: bool = False,
        **options: Any,
    ) -> None:
        self._server = server
        self._job = partial(Job, module, [*arguments], constants, forks)
        super().__init__([sys.executable, "-m", module, *arguments], **options)

    def poll(self) -> int | None:
        with self._reading:
            if self.returncode is None:
                with suppress(BlockingIOError):
                    told = os.read(self._status, 20)
                    if not told:
                        raise self._server.lost()
                    os.close(self._status)
                    self.returncode = int(told)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._reading:
            # Another thread may read and close it meanwhile.
            status = None if self.returncode is not None else os.dup(self._status)
        if status is not None:
            try:
                ended = select.poll()
                ended.register(status, select.POLLIN)
                ended.poll(None if timeout is None else max(0.0, timeout) * 1000)
            finally:
                os.close(status)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _execute_child(self, *given: Any) -> None:
        """Forks where the base class executes; the parameters are the base class's."""
        told = inspect.signature(EXECUTE).bind(self, *given).arguments
        self.fork(self._server, self._job, told)

    def fork(self, server: ForkServer, job: Callable[..., Job], told: Mapping[str, Any]) -> None:
        """Completes the job by the arguments of the base class for executing."""
        sys.audit("subprocess.Popen", sys.executable, told["args"], told["cwd"], told["env"])
        env = told["env"] or os.environ
        directory = str(told["cwd"] or Path.cwd())
        path = added_directories(env) or []
        leads = told["start_new_session"], told["process_group"] == 0
        message = job(*leads, {**env}, directory, path)
        ours = told["p2cread"], told["c2pwrite"], told["errwrite"]
        # Where no file is given, the process has the one of this process.
        files = [own if given == -1 else given for own, given in enumerate(ours)]
        self._server, self._reading = server, threading.Lock()
        # Read when the process has ended.
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        try:
            self.pid = server.fork(message, [*files, status])
            self._child_created = True
        finally:
            os.close(status)
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            CLOSE_PIPES(self, *(told[pipe] for pipe in pipes))
