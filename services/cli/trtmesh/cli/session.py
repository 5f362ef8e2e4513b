"""Runs a command and maps the outcome to an exit status.

0    success
1    an item or a call failed, nothing is ready, or a process of the stack ended for good
2    the command line or a setting is wrong
3    a port is in use
4    the model is missing or unusable
130  interrupted by Ctrl-C
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from trtmesh.chassis.addresses import DEFAULT_ADDRESS
from trtmesh.chassis.bearer import ApiKey
from trtmesh.chassis.connecting import WrongConnection, WrongService, check_address
from trtmesh.chassis.errors import (
    SettingsError,
    StartupError,
    TrtmeshError,
    Unauthenticated,
    Unavailable,
)
from trtmesh.cli.option_groups import option
from trtmesh.cli.output import give_up, say_error
from trtmesh.cli.stacks import stack_meant
from trtmesh.cli.tls import CONNECTION, TlsOptions

if TYPE_CHECKING:
    from trtmesh.client import Client

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        help="File with the API key; unset means the variable TRTMESH_API_KEY, if set.",
        rich_help_panel=CONNECTION,
    ),
]
API_KEY_HINT = "give the key in TRTMESH_API_KEY or with --api-key-file"


def run(command: Coroutine[Any, Any, int]) -> None:
    """Runs `command`, prints an error and exits with the status."""
    end_with(lambda: asyncio.run(command))


def end_with(command: Callable[[], int]) -> None:
    """The same for a function that computes for long: Ctrl-C ends it at once."""
    try:
        status = command()
    except TrtmeshError as error:
        say_error(f"{error.reason}: {error}")
        status = FAILED
    except StartupError as error:
        say_error(str(error))
        status = error.exit_status
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left. Python would fail again with the flush at exit.
        give_up(sys.stdout)
        status = FAILED
    raise typer.Exit(status)


@dataclass(frozen=True, slots=True)
class AddressOption:
    """An option for the address of a server."""

    name: str
    variable: str
    server: str
    needed: str
    """The right server for the address."""
    tls: str = "--tls, --ca, --cert, --cert-key and --server-name"
    """Options of TLS."""

    @property
    def setting(self) -> str:
        """As errors name it."""
        return f"{self.name} ({self.variable})"


ROUTER = AddressOption(
    "--router",
    "TRTMESH_ROUTER",
    "router",
    "a router's address for clients (router.port, here 8001)",
)


@contextmanager
def address_explained(address: str, option: AddressOption) -> Iterator[None]:
    """Names the option, the address and the remedy in errors of connecting. Raises SettingsError for a malformed
    address, and for the address of another server."""
    setting = option.setting
    check_address(address, setting)
    try:
        yield
    except WrongConnection as error:
        raise SettingsError(
            f"is {address}, but {_why(error, address, option)}", setting=setting
        ) from error
    except Unavailable as error:
        if type(error) is not Unavailable:
            raise
        raise Unavailable(
            f"{option.server} {address}: {_why(error, address, option)}; `trtmesh up` starts a stack,"
            f" {option.name} names another address"
        ) from error
    except WrongService as error:
        raise SettingsError(
            f"is {address}, which does not serve this call: it must be {option.needed}",
            setting=setting,
        ) from error


def _why(error: Unavailable, address: str, option: AddressOption) -> str:
    """Returns the problem of a connection, with the options of TLS if relevant."""
    why = str(error).removeprefix(f"{address}: ")
    matters = any(word in why for word in ("TLS", "certificate"))
    return f"{why} ({option.tls} set TLS)" if matters else why


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """Options of a router's clients."""

    router: str | None = option(
        f"Router to talk to, host:port; unset, that of your stack, else {DEFAULT_ADDRESS}.",
        envvar="TRTMESH_ROUTER",
        panel=CONNECTION,
    )
    api_key_file: ApiKeyFileOption = None
    tls: TlsOptions = field(default_factory=TlsOptions)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """Connects to the router, by default of the user's stack; errors name the address and the remedy."""
        from trtmesh.client import Client

        api_key = ApiKey.read(self.api_key_file, os.environ)
        address, tls = self.router, self.tls.client_tls()
        if address is None:
            stack = stack_meant(ROUTER.setting)
            address, tls = stack.router, stack.tls(tls)
        with address_explained(address, ROUTER):
            try:
                async with Client(address, tls=tls, api_key=api_key) as client:
                    yield client
            except Unauthenticated as error:
                raise Unauthenticated(f"router {address}: {error}; {API_KEY_HINT}") from error
