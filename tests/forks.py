"""Service processes without their imports: one process of each kind imports, and forks into the others.

A `Forked` is a process like every other `subprocess.Popen`, with its own environment, files, sockets and signals. It
dies with this process.
"""

from __future__ import annotations

import atexit
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from fork_server import LONGEST_MESSAGE, OF_STARTS, Job
from process_constants import Constants

SERVER = Path(__file__).with_name("fork_server.py")
WITH_CONSTANTS = Path(__file__).with_name("process_constants.py")
NO_CONSTANTS: Constants = {}

OF_IMPORTS = ("GRPC_", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR")
"""Set in this process by what tests import, and alike by the same imports elsewhere."""
LATE = (
    *("TRTMESH_", "TRTLLM_STAND_IN_", "AIP_", "SAGEMAKER_", "PYTEST_"),
    *("COLUMNS", "XDG_RUNTIME_DIR", "TESTED_COMMAND", "FAKE_"),
    *OF_IMPORTS,
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


class ForkServer:
    """The process of `fork_server.py`, which has done some imports."""

    def __init__(self, imports: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, SERVER, str(theirs.fileno()), *imports],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=EARLY,
                pass_fds=[theirs.fileno()],
            )
        self._asking = threading.Lock()
        self.is_fit = True
        """Whether it forks: not where an import has started a thread. Known when it is ready."""
        self._is_ready = False
        atexit.register(self._end)

    @property
    def pid(self) -> int:
        """The parent of the forked processes."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Waits for the end of the imports."""
        with self._asking:
            if not self._is_ready:
                self.is_fit = self._answer() == b"ready"
                self._is_ready = True

    def fork(self, job: Job, files: Sequence[int]) -> int:
        """Forks a process with these standard files; the last one takes its status. Returns its pid."""
        self.wait_ready()
        message = json.dumps(asdict(job)).encode()
        assert len(message) < LONGEST_MESSAGE
        with self._asking:
            with suppress(ConnectionError):
                socket.send_fds(self._control, [message], files)
            return int(self._answer())

    def lost(self) -> RuntimeError:
        """Waits for the end of the server, which has closed what it had open."""
        return RuntimeError(f"the fork server ended with {self._process.wait()}")

    def _answer(self) -> bytes:
        with suppress(ConnectionError):
            if answer := self._control.recv(LONGEST_MESSAGE):
                return answer
        raise self.lost()

    def _end(self) -> None:
        self._control.close()
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
    **options: Any,
) -> subprocess.Popen[Any]:
    """Starts `python -m MODULE ARGUMENTS`, with pipes unless `options` have files: forked, unless a variable must be
    there when it imports or the imports start threads."""
    server.wait_ready()
    options = {
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
        **options,
        "env": env,
    }
    if server.is_fit and is_like_ours(env):
        return Forked(server, module, arguments, constants, **options)
    main = ["-m"] if not constants else [str(WITH_CONSTANTS), json.dumps(constants)]
    return subprocess.Popen([sys.executable, *main, module, *arguments], **options)


class Forked(subprocess.Popen[Any]):
    """`python -m MODULE ARGUMENTS`, forked from a process that has done the imports, which is its parent."""

    def __init__(
        self,
        server: ForkServer,
        module: str,
        arguments: Sequence[str],
        constants: Constants = NO_CONSTANTS,
        **options: Any,
    ) -> None:
        self._server = server
        self._module, self._arguments, self._constants = module, [*arguments], constants
        self._status = -1
        """Read when the process has ended."""
        self._reading = threading.Lock()
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
        ends_at = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > ends_at:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.002)
        return status

    def _execute_child(self, *given: Any) -> None:
        """Forks where the base class executes; the parameters are the base class's."""
        # Its stubs leave the privates out.
        base: Any = subprocess.Popen
        told = inspect.signature(base._execute_child).bind(self, *given).arguments
        sys.audit("subprocess.Popen", sys.executable, told["args"], told["cwd"], told["env"])
        directory = str(told["cwd"] or Path.cwd())
        env = told["env"] or os.environ
        path = added_directories(env) or []
        job = Job(self._module, self._arguments, {**env}, directory, path, self._constants)
        ours = told["p2cread"], told["c2pwrite"], told["errwrite"]
        # Where no file is given, the process has the one of this process.
        files = [own if given == -1 else given for own, given in enumerate(ours)]
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        try:
            self.pid = self._server.fork(job, [*files, status])
            self._child_created = True
        finally:
            os.close(status)
            pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            base._close_pipe_fds(self, *(told[pipe] for pipe in pipes))
