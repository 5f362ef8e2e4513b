"""The `trtmesh` command for tests, as a user runs it: forked from a process that has its imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, TypeVar

import grpc
import psutil
from e2e.corruption import corrupted
from fork_server import MARK
from forks import ForkServer, fork_server, start_module
from process_constants import parted
from processes import CONVERTERS, ON_ONE_HOST, ONE_PROCESS, server_of
from trtmesh.cli.lazy import LazyCommand
from trtmesh.v1 import router_admin_pb2 as pb
from trtmesh.v1 import router_admin_pb2_grpc

TRTMESH = str(Path(sys.executable).with_name("trtmesh"))


def modules_of(package: str) -> list[str]:
    """All modules in a package, which this process need not import."""
    spec = find_spec(package)
    assert spec
    (folder,) = map(Path, spec.submodule_search_locations or ())
    files = [file.relative_to(folder).with_suffix("") for file in sorted(folder.rglob("*.py"))]
    names = (".".join((package, *file.parts)).removesuffix(".__init__") for file in files)
    return [name for name in names if not name.endswith((".__main__", ONE_PROCESS))]


IMPORTS = ("trtmesh.cli.__main__", *modules_of("trtmesh.cli"), *modules_of("trtmesh.tools"))
"""A command imports most of it once it runs."""
STOP_SECONDS = 60.0
"""Upper bound of a wait for an end; no test depends on the actual time."""

EXECUTED = "TESTED_AS_EXECUTED"
"""Variable with which a command executes what it starts."""

FREE_PORTS = (
    *("--port", "0", "--admin-port", "0"),
    *("--http-port", "0", "--metrics-port", "0"),
)
"""Flags of a stack on free ports."""

PATIENT = {f"TRTMESH_ROUTER_DEADLINES_{name}_SECONDS": "60" for name in ("SILENCE", "STEP_GAP")}
"""Variables of every stack: a slow moment of the machine neither moves items nor excludes an engine."""

T = TypeVar("T")


def loaded(command: Any) -> Any:
    """The command itself, in place of one whose module is imported when it runs."""
    return command.load() if isinstance(command, LazyCommand) else command


def trtmesh(
    *arguments: str,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to the end, in a process forked from one that has the imports."""
    given = {**os.environ, **(env or {})}
    with start_command(*arguments, env=given, directory=directory) as process:
        try:
            out, err = process.communicate(stdin)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_command(
    *arguments: str, env: Mapping[str, str], directory: Path | None = None, **files: Any
) -> subprocess.Popen[str]:
    """Starts a command in a process forked from one that has the imports, and so what it starts. It has pipes in place
    of the standard files that are not given. A `constant` among the arguments gives it another value of it."""
    arguments, constants = parted(arguments)
    forks = not env.get(EXECUTED)
    for each in _servers(arguments) if forks else ():
        each.wait_ready()
    server = fork_server(IMPORTS)
    return start_module(
        server,
        "trtmesh.cli",
        arguments,
        env,
        constants,
        forks=forks,
        cwd=directory,
        text=True,
        **files,
    )


BEFORE_CONVERSIONS = """
import os, sys
if any(".convert-" in each for each in sys.argv):
    # Its standard input ends with the command.
    os.read(0, 1)
"""


def held_conversions(folder: Path) -> dict[str, str]:
    """Variables of a command that converts: the process that it starts waits before its imports, for good."""
    return corrupted(folder, BEFORE_CONVERSIONS)


def run_program(
    text: str, folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program of the folder in a process forked from one that has the imports of commands."""
    (folder / "program.py").write_text(text)
    given = {**os.environ, **(env or {})}
    with start_module(fork_server(IMPORTS), "program", (), given, cwd=folder, text=True) as process:
        out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _servers(arguments: Sequence[str]) -> list[ForkServer]:
    """The servers of what a command starts; it starts none of them itself."""
    match arguments:
        case ["up" | "demo", *_] if "--one-process" in arguments:
            return [server_of(ONE_PROCESS, ())]
        case ["up" | "demo", *_]:
            return [server_of(each, arguments) for each in ("router", "tokenizer", "engine")]
        case ["convert", *_] | ["adapters", "convert", *_]:
            return [server_of(each, ()) for each in CONVERTERS]
    return []


@dataclass
class Running:
    """A running command; collects the lines of output."""

    popen: subprocess.Popen[str]
    mark: str
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    _arrived: threading.Condition = field(default_factory=threading.Condition)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stream, lines in ((self.popen.stdout, self.out), (self.popen.stderr, self.err)):
            reader = threading.Thread(target=self._collect, args=(stream, lines), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _collect(self, stream: IO[str], lines: list[str]) -> None:
        with stream:
            for line in stream:
                with self._arrived:
                    lines.append(line)
                    self._arrived.notify_all()

    def wait_for(self, text: str) -> str:
        """Waits for the first line with `text`; fails if the command ends first."""

        def found() -> str | None:
            return next((line for line in (*self.out, *self.err) if text in line), None)

        return self.wait_until(found, repr(text))

    def wait_until(self, told: Callable[[], T | None], what: str) -> T:
        """Waits for a true result of `told`, and returns it; fails if the command ends first."""
        with self._arrived:
            while not (found := told()):
                assert any(reader.is_alive() for reader in self._readers), (
                    f"ended without {what}:\n{''.join((*self.out, *self.err))}"
                )
                self._arrived.wait(timeout=1)
            return found

    def descendants(self) -> list[psutil.Process]:
        """Running ones. Ended processes have no environment, even as zombies."""
        return [
            process
            for process in psutil.process_iter(["environ"])
            if (process.info["environ"] or {}).get(MARK) == self.mark
            and process.pid != self.popen.pid
        ]

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def close_stdin(self) -> None:
        assert self.popen.stdin
        self.popen.stdin.close()

    def wait(self) -> int:
        """Waits for the end and all lines; returns the exit status."""
        status = self.popen.wait(STOP_SECONDS)
        for reader in self._readers:
            reader.join(STOP_SECONDS)
        self.close_stdin()
        return status

    def end(self) -> None:
        """Kills the command and all descendants."""
        if self.popen.poll() is None:
            self.popen.kill()
        for process in self.descendants():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.wait()

    def left_nothing(self) -> bool:
        """Whether all descendants end within the time of a stop."""
        ends_at, pause = time.monotonic() + STOP_SECONDS, 0.01
        while left := self.descendants():
            if time.monotonic() > ends_at:
                break
            # A look at all processes of the machine takes as long as the first pause.
            time.sleep(pause)
            pause = min(1.5 * pause, 0.1)
        return not left


class Stack(Running):
    """A running `trtmesh up --output json`."""

    def wait_ready(self) -> str:
        """The first router's address, after every process serves."""
        return str(json.loads(self.wait_for('"event": "ready"'))["router"])

    @property
    def admin(self) -> str:
        """The first router's admin address, after every process serves."""
        return str(json.loads(self.wait_for('"event": "ready"'))["admin"])

    @property
    def children(self) -> list[dict[str, Any]]:
        return [child for line in self.out if (child := json.loads(line))["event"] == "serving"]

    def child(self, name: str) -> dict[str, Any]:
        return next(child for child in self.children if child["name"] == name)


@contextmanager
def running(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Starts a command; ends it with all descendants on exit."""
    command = Running(*_start(arguments, env))
    try:
        yield command
    finally:
        command.end()


@contextmanager
def running_stack(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """Starts `trtmesh up`, by default with simulated engines; returns before the stack serves."""
    arguments = ("up", "--output", "json", "--grace-seconds", "60", *flags)
    if "--backend" not in flags:
        arguments += ("--backend", "simulated")
    for port in ("--admin-port", "--http-port", "--metrics-port"):
        if port not in flags:
            arguments += (port, "0")
    stack = Stack(*_start(arguments, env))
    try:
        yield stack
    finally:
        stack.end()


def live_requests(admin: str) -> int:
    """The number of live requests of a router."""
    with grpc.insecure_channel(admin) as channel:
        ask = router_admin_pb2_grpc.RouterAdminServiceStub(channel).ListRequests
        return int(ask(pb.ListRequestsRequest(limit=1), wait_for_ready=True).live_requests)


def until_idle(admin: str) -> None:
    """Waits until a router has no live requests: it may notice the end of a client later than the client itself."""
    while live_requests(admin):
        time.sleep(0.01)


def _start(
    arguments: tuple[str, ...], env: Mapping[str, str] | None
) -> tuple[subprocess.Popen[str], str]:
    mark = uuid.uuid4().hex
    # Stacks of other tests are not those of this user.
    apart = str(Path(os.environ["XDG_RUNTIME_DIR"]) / mark)
    own = {"XDG_RUNTIME_DIR": apart, **(env or {}), MARK: mark}
    given = {**os.environ, **ON_ONE_HOST, **PATIENT, **own}
    return start_command(*arguments, env=given), mark


def read_until_closed(terminal: int) -> str:
    """The output of a command on the other side of `terminal`."""
    parts = []
    with suppress(OSError):  # Linux reports a closed other side of a terminal so.
        while part := os.read(terminal, 65536):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode(errors="replace")
