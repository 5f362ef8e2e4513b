"""The processes of a stack that `trtmesh up` started on this machine, and signals to them.

A process is only signalled while it is what was found: a child of the stack's own process, of this user, with the
command line of a service. A handle of the kernel, not its number, names it, so that none which took a number over is
ever hit.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.stacks import RunningStack, running_stacks

PROC = Path("/proc")
SERVICES = ("engine", "router", "tokenizer")


@dataclass(frozen=True, slots=True)
class StackProcess:
    """A service of a stack."""

    pid: int
    service: str
    name: str
    """An engine's name; of others the service."""


def processes_of(stack: RunningStack) -> list[StackProcess]:
    """The living processes of the services, in the order of their start."""
    pids = (int(each.name) for each in PROC.iterdir() if each.name.isdigit())
    return [found for pid in sorted(pids) if (found := _service_of(pid, stack))]


def _service_of(pid: int, stack: RunningStack) -> StackProcess | None:
    """None for a process that is no service of the stack, or has ended."""
    with suppress(OSError):
        folder = PROC / str(pid)
        # The name of a program stands in brackets, and may have any characters.
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        if folder.stat().st_uid != os.getuid() or int(parent) != stack.pid or state == "Z":
            return None
        words = (folder / "cmdline").read_text(errors="replace").split("\0")
        for service in SERVICES:
            if "-m" in words and words[words.index("-m") + 1] == f"trtmesh.{service}":
                has_name = "--worker" in words
                name = words[words.index("--worker") + 1] if has_name else service
                return StackProcess(pid, service, name)
    return None


@contextmanager
def _handle(process: StackProcess, stack: RunningStack) -> Iterator[int]:
    """Raises ProcessLookupError unless it is still the same."""
    handle = os.pidfd_open(process.pid)
    try:
        if _service_of(process.pid, stack) != process:
            raise ProcessLookupError(process.pid)
        yield handle
    finally:
        os.close(handle)


def kill(process: StackProcess, stack: RunningStack) -> None:
    """As the kernel does when memory is short. Raises ProcessLookupError for one that has ended."""
    with _handle(process, stack) as handle:
        signal.pidfd_send_signal(handle, signal.SIGKILL)


@contextmanager
def frozen(process: StackProcess, stack: RunningStack) -> Iterator[None]:
    """Stops it for the length of the block. Raises ProcessLookupError for one that has ended."""
    with _handle(process, stack) as handle:
        signal.pidfd_send_signal(handle, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGCONT)


def stack_of(router: str, asked: str | None) -> RunningStack:
    """The stack with the admin address `asked`, else the one whose router is measured: no other is ever disturbed.
    Raises SettingsError."""
    if not hasattr(os, "pidfd_open"):
        raise SettingsError("needs Linux, whose processes it can name safely", setting="--disrupt")
    stacks = running_stacks()
    for stack in stacks:
        if asked in (stack.admin, stack.router) if asked else stack.router == router:
            return stack
    told = "; ".join(f"{each.models}: router {each.router}, admin {each.admin}" for each in stacks)
    wanted = (
        f"is {asked}" if asked else f"is not set, and no stack of yours has the router {router}"
    )
    raise SettingsError(
        f"{wanted}, but must be the admin address of a stack that you run here with `trtmesh up`; there"
        f" {'is ' + told if told else 'is none'}",
        setting="--stack",
    )
