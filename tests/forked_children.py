"""Makes a forked process, such as a command that starts a stack, fork the services and helpers that it starts."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache, partial
from typing import Any

from fork_server import Job
from forks import EXECUTE, NO_CONSTANTS, Forked, ForkServer, NotRunning, is_like_ours
from processes import imports_of


def fork_children(imports: tuple[str, ...]) -> None:
    """Services whose server runs, and modules among the imports of this process, are forked from here on; all other
    processes are executed."""
    _imports.update(dict.fromkeys(imports, imports))
    popen: Any = subprocess.Popen
    popen._execute_child = _start
    wait = os.waitpid

    def waited(pid: int, options: int) -> tuple[int, int]:
        """A forked process has another parent, and asyncio waits for it by this function."""
        if (process := _forked.get(pid)) is None:
            return wait(pid, options)
        code = process.poll() if options & os.WNOHANG else process.wait()
        return (0, 0) if code is None else (pid, code << 8 if code >= 0 else -code)

    os.waitpid = waited


_forked = dict[int, Forked]()
_imports = dict[str, tuple[str, ...]]()
"""The imports of this process, by each of them."""


def _start(process: Any, *given: Any) -> None:
    """Starts a process as `subprocess.Popen` does."""
    told = inspect.signature(EXECUTE).bind(process, *given).arguments
    match told["args"]:
        case [sys.executable, "-m", module, *arguments] if is_like_ours(told["env"] or os.environ):
            with suppress(NotRunning):
                own = _imports.get(module)
                server = _server(own or imports_of(module.removeprefix("trtmesh."), arguments))
                if server.is_fit:
                    process.__class__ = Forked
                    process.fork(server, partial(Job, module, arguments, NO_CONSTANTS, False), told)
                    _forked[process.pid] = process
                    return
    EXECUTE(process, *given)


@cache
def _server(imports: tuple[str, ...]) -> ForkServer:
    """Raises NotRunning."""
    server = ForkServer(imports, may_start=False)
    server.wait_ready()
    return server
