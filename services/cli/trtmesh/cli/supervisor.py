"""Runs a stack until a signal ends it, and leaves no process running on any exit path."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from trtmesh.chassis.errors import SettingsError, StartupError
from trtmesh.cli.logs import process_log
from trtmesh.cli.mesh_settings import Flags, config_file_of, load_mesh_settings
from trtmesh.cli.output import say
from trtmesh.cli.plan import Plan
from trtmesh.cli.session import INTERRUPTED, OK
from trtmesh.cli.stack import KILL_AFTER_SECONDS, Stack
from trtmesh.cli.stacks import StackFile, stack_file
from trtmesh.cli.starting import progress
from trtmesh.cli.temporary_ca import temporary_ca
from trtmesh.tools.import_triton import imported_repository

Use = Callable[[Stack], Coroutine[Any, Any, int]]
"""The work of a command while the stack serves; returns the command's exit status."""


async def supervise(flags: Flags, use: Use, defaults: Flags = MappingProxyType({})) -> int:
    """Starts a stack, keeps all processes alive during `use`, stops them and returns the exit status. `defaults` have
    the lowest precedence of all settings."""
    with imported_repository(flags) as effective:
        settings = load_mesh_settings(effective, defaults)
        try:
            with (
                process_log(settings.log_dir) as log,
                temporary_ca(settings.host) if settings.tls else nullcontext() as tls,
                stack_file() as file,
            ):
                plan = Plan(settings, config_file_of(effective), tls, file.prefix)
                starting = ExitStack()
                with starting:
                    stack = Stack(settings, plan, log, starting.enter_context(progress()))
                    return await _Supervision(stack, use, file, starting).run()
        except StartupError as error:
            error.setting = settings.spelling(error.setting)
            raise


@dataclass(slots=True)
class _Supervision:
    _stack: Stack
    _use: Use
    _file: StackFile
    _starting: ExitStack
    """Shows the progress of the start."""
    _work: asyncio.Task[int] = field(init=False)
    _serving: bool = False
    _killed: bool = False
    _interrupts: int = 0

    async def run(self) -> int:
        with _interrupts(self._interrupt, stdin=self._stdin()):
            self._work = asyncio.create_task(self._start_and_use())
            try:
                await asyncio.wait((self._work,))
            finally:
                await self._stack.stop()
        if self._work.cancelled():
            return OK if self._serving and not self._killed else INTERRUPTED
        return self._work.result()

    def _stdin(self) -> int | None:
        return sys.stdin.fileno() if self._stack.settings.stop_on_stdin_eof else None

    async def _start_and_use(self) -> int:
        await self._stack.start()
        self._serving = True
        self._starting.close()
        self._file.write(self._stack.place)
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(self._stack.keep_alive())
            status = await self._use(self._stack)
            keeping.cancel()
        return status

    def _interrupt(self) -> None:
        """Stops in order the first time, kills all processes the second time."""
        self._interrupts += 1
        if self._interrupts == 1:
            say(
                "stopping; a second Ctrl-C ends all processes at once and cuts running requests off"
            )
            self._work.cancel()
        else:
            self._killed = True
            self._stack.kill()
            # Whatever does not end by then: nothing of this process is needed any more.
            asyncio.get_running_loop().call_later(KILL_AFTER_SECONDS, os._exit, INTERRUPTED)


@contextmanager
def _interrupts(interrupt: Callable[[], None], stdin: int | None) -> Iterator[None]:
    """Calls `interrupt` on each SIGINT and SIGTERM, on the first SIGHUP unless another came before, and at the end of
    `stdin` unless it is None. SIGUSR1 and SIGUSR2 do nothing, as in the services."""
    loop = asyncio.get_running_loop()
    came: list[signal.Signals] = []

    def take(number: signal.Signals) -> None:
        if number is not signal.SIGHUP or not came:
            came.append(number)
            interrupt()

    def read_stdin() -> None:
        assert stdin is not None
        if not os.read(stdin, 4096):
            loop.remove_reader(stdin)
            interrupt()

    if stdin is not None:
        try:
            loop.add_reader(stdin, read_stdin)
        except PermissionError as error:
            raise SettingsError(
                "needs a pipe or a terminal as input", setting="mesh.stop_on_stdin_eof"
            ) from error
    ending = [signal.SIGINT, signal.SIGTERM]
    # Under nohup the signal is ignored, and stays so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    for number in ending:
        loop.add_signal_handler(number, take, number)
    foreign = (signal.SIGUSR1, signal.SIGUSR2)
    for number in foreign:
        loop.add_signal_handler(number, lambda: None)
    try:
        yield
    finally:
        for number in (*ending, *foreign):
            loop.remove_signal_handler(number)
        if stdin is not None:
            loop.remove_reader(stdin)
