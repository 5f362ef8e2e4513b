"""The processes of a stack that `trtmesh up` started on this machine, and signals to them.

Only a child of the stack's own process, of this user, with the command line of a service is ever signalled, and psutil
makes sure that no other one has taken its number over.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.stacks import RunningStack, running_stacks
from trtmesh.tools.bench.faults import SERVICES


@dataclass(frozen=True, slots=True)
class StackProcess:
    """A service of a stack."""

    process: psutil.Process
    service: str
    name: str
    """An engine's name; of others the service."""


def processes_of(stack: RunningStack) -> list[StackProcess]:
    """The living processes of the services, in the order of their start."""
    with suppress(psutil.Error):
        children = sorted(psutil.Process(stack.pid).children(), key=lambda each: each.pid)
        return [service for each in children for service in _service_of(each)]
    return []


def _service_of(process: psutil.Process) -> Iterator[StackProcess]:
    with suppress(psutil.Error):
        words = process.cmdline()
        if process.uids().real != os.getuid() or "-m" not in words:
            return
        module = words[words.index("-m") + 1]
        for service in SERVICES:
            if module == f"trtmesh.{service}":
                has_name = "--worker" in words
                name = words[words.index("--worker") + 1] if has_name else service
                yield StackProcess(process, service, name)


@contextmanager
def frozen(process: psutil.Process) -> Iterator[None]:
    """Stops it for the length of the block. Raises psutil.NoSuchProcess for one that has ended."""
    process.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def stack_of(router: str, asked: str | None) -> RunningStack:
    """The stack with the admin address `asked`, else the one whose router is measured: no other is ever disturbed.
    Raises SettingsError."""
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
