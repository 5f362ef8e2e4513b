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
from pathlib import Path
from typing import Annotated, Any

import typer
from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.errors import StartupError, TrtmeshError, Unauthenticated, Unavailable
from trtmesh.cli.output import give_up, say_error
from trtmesh.client import Client, ClientTls

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(help="File with the API key; unset means the variable TRTMESH_API_KEY, if set."),
]
API_KEY_HINT = "give the key in TRTMESH_API_KEY or with --api-key-file"


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
async def connected(
    address: str, tls: ClientTls | None, api_key: ApiKey | None
) -> AsyncIterator[Client]:
    """Connects to a router; errors name its address and the remedy."""
    try:
        async with Client(address, tls=tls, api_key=api_key) as client:
            yield client
    except Unauthenticated as error:
        raise Unauthenticated(f"router {address}: {error}; {API_KEY_HINT}") from error
    except Unavailable as error:
        if type(error) is not Unavailable:
            raise
        raise Unavailable(
            f"router {address}: {error}; `trtmesh up` starts a stack, --router names another router"
        ) from error
