"""How a command runs and what its exit status says.

0    all went well
1    an item or a call failed, nothing is ready, or a process of the stack could not be kept
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
    """Runs `command`, says what went wrong, and exits with the status."""
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
        # The reader of our output left. Python would complain once more when it flushes at exit.
        give_up(sys.stdout)
        status = FAILED
    raise typer.Exit(status)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    """A client of the router; where none answers, the error says which was tried and how to get one."""
    try:
        async with Client(address) as client:
            yield client
    except Unavailable as error:
        if type(error) is not Unavailable:
            raise
        raise Unavailable(
            f"router {address}: {error}; `trtmesh up` starts a stack, --router names another router"
        ) from error
