"""The `trtmesh` command for tests, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

TRTMESH = str(Path(sys.executable).with_name("trtmesh"))
STOP_SECONDS = 30.0


def trtmesh(
    *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end."""
    return subprocess.run(
        [TRTMESH, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        check=False,
    )


@dataclass
class Running:
    """A command that goes on by itself; its lines are collected as they come."""

    popen: subprocess.Popen[str]
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
        """The first line that has `text`, waiting for it; fails when the command ends without it."""
        with self._arrived:
            while True:
                for line in (*self.out, *self.err):
                    if text in line:
                        return line
                assert any(reader.is_alive() for reader in self._readers), (
                    f"ended without {text!r}:\n{''.join((*self.out, *self.err))}"
                )
                self._arrived.wait(timeout=1)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def signal(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)

    def close_stdin(self) -> None:
        assert self.popen.stdin
        self.popen.stdin.close()

    def wait(self) -> int:
        """Its exit status, once it ended and all its lines are here."""
        status = self.popen.wait(STOP_SECONDS)
        for reader in self._readers:
            reader.join(STOP_SECONDS)
        self.close_stdin()
        return status

    def end(self) -> None:
        """Kills it and all that it started."""
        if self.popen.poll() is None:
            processes = [*self.descendants(), psutil.Process(self.popen.pid)]
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        self.wait()


class Stack(Running):
    """A running `trtmesh up --output json`."""

    def wait_ready(self) -> str:
        """The first router's address, once every process serves."""
        return str(json.loads(self.wait_for('"event": "ready"'))["router"])

    @property
    def admin(self) -> str:
        """The first router's address for admins, once every process serves."""
        return str(json.loads(self.wait_for('"event": "ready"'))["admin"])

    @property
    def children(self) -> list[dict[str, Any]]:
        return [child for line in self.out if (child := json.loads(line))["event"] == "serving"]

    def child(self, name: str) -> dict[str, Any]:
        return next(child for child in self.children if child["name"] == name)


@contextmanager
def running(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Starts a command and ends it, and all that it started, on the way out."""
    command = Running(_start(arguments, env))
    try:
        yield command
    finally:
        command.end()


@contextmanager
def running_stack(*flags: str, env: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """Starts `trtmesh up` with simulated engines unless `flags` say otherwise; it may not serve yet."""
    arguments = ("up", "--output", "json", "--grace-seconds", "5", *flags)
    if "--backend" not in flags:
        arguments += ("--backend", "simulated")
    for port in ("--admin-port", "--http-port", "--metrics-port"):
        if port not in flags:
            arguments += (port, "0")
    stack = Stack(_start(arguments, env))
    try:
        yield stack
    finally:
        stack.end()


def _start(arguments: tuple[str, ...], env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [TRTMESH, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )


def read_until_closed(terminal: int) -> str:
    """What a command shows on the terminal of which `terminal` is the other side."""
    parts = []
    with suppress(OSError):  # How Linux ends a terminal whose other side was closed.
        while part := os.read(terminal, 65536):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode(errors="replace")


def gone(processes: list[psutil.Process]) -> bool:
    """Whether all of them ended, within the time that a stop may take."""
    _, alive = psutil.wait_procs(processes, timeout=STOP_SECONDS)
    return not alive
