"""Runs a command and maps its outcome to an exit status.

0    success
1    an item or a call failed, nothing is ready, or a process of the stack ended for good
2    the command line or a setting is wrong
3    a port is in use
4    the model is missing or unusable
130  interrupted by Ctrl-C
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import typer
from trtmesh.chassis.errors import StartupError, TrtmeshError, Unavailable
from trtmesh.cli.output import give_up, say_error
from trtmesh.client import Client

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


def run(command: Coroutine[Any, Any, int]) -> None:
    """Runs `command`, prints its error and exits with its status."""
    try:
        status = asyncio.run(command)
    except TrtmeshError as error:
        say_error(f"{error.reason}: {error}")
        status = FAILED
    except StartupError as error:
        say_error(str(error))
        status = error.exit_status
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left. Python would fail again when it flushes at exit.
        give_up(sys.stdout)
        status = FAILED
    raise typer.Exit(status)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    """Connects to a router; the error of an unreachable one names its address and the remedy."""
    try:
        async with Client(address) as client:
            yield client
    except Unavailable as error:
        if type(error) is not Unavailable:
            raise
        raise Unavailable(
            f"router {address}: {error}; `trtmesh up` starts a stack, --router names another router"
        ) from error
