"""Options, connection and errors of the commands that call a router's admin address."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from trtmesh.chassis.errors import Unauthenticated
from trtmesh.cli.session import AddressOption, address_explained, run
from trtmesh.cli.stacks import stack_meant
from trtmesh.cli.tls import (
    CONNECTION,
    CaOption,
    CertOption,
    KeyOption,
    ServerNameOption,
    TlsOption,
    tls_of,
)
from trtmesh.client import DEFAULT_ADMIN_ADDRESS, AdminClient, AdminToken


@dataclass(frozen=True, slots=True)
class Context:
    admin: AdminClient
    as_json: bool


Command = Callable[..., Coroutine[Any, Any, int]]

ADMIN = AddressOption(
    "--admin", "TRTMESH_ADMIN", "router", "a router's admin address (router.admin.port, here 8003)"
)


def admin_command(command: Command) -> Callable[..., None]:
    """Makes a typer command of `async command(context, own options) -> exit status`: adds options of the connection,
    connects, and prints errors."""

    async def call(**values: Any) -> int:
        given = {name: values.pop(name) for name in options}
        async with _connected(**given) as context:
            return await command(context, **values)

    def with_options(**values: Any) -> None:
        run(call(**values))

    options = inspect.signature(_connected, eval_str=True).parameters
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    signature = inspect.Signature([*own, *options.values()])
    functools.update_wrapper(with_options, command, assigned=("__name__", "__doc__", "__module__"))
    with_options.__annotations__ = {n: p.annotation for n, p in signature.parameters.items()}
    with_options.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return with_options


@asynccontextmanager
async def _connected(
    *,
    admin: Annotated[
        str | None,
        typer.Option(
            envvar="TRTMESH_ADMIN",
            help=f"Admin address of the router, host:port; unset, that of your stack, else {DEFAULT_ADMIN_ADDRESS}.",
            rich_help_panel=CONNECTION,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the router's admin token; unset means TRTMESH_ADMIN_TOKEN.",
            rich_help_panel=CONNECTION,
        ),
    ] = None,
    timeout: Annotated[  # noqa: ASYNC109 - an option of the command line
        float,
        typer.Option(
            min=0.1,
            max=86400,
            help="Longest silence of the router, in seconds.",
            rich_help_panel=CONNECTION,
        ),
    ] = 10.0,
    tls: TlsOption = False,
    ca: CaOption = None,
    cert: CertOption = None,
    key: KeyOption = None,
    server_name: ServerNameOption = "",
    json: Annotated[
        bool,
        typer.Option(
            "--json", help="One JSON object per line, with the field names of the protos."
        ),
    ] = False,
) -> AsyncIterator[Context]:
    """Connects to a router; errors name its address and the remedy. The parameters are options of every command."""
    token = AdminToken.read(token_file, os.environ)
    security = tls_of(tls=tls, ca=ca, cert=cert, key=key, server_name=server_name)
    if admin is None:
        stack = stack_meant(ADMIN.setting)
        admin, security = stack.admin, stack.tls(security)
    with address_explained(admin, ADMIN):
        try:
            async with AdminClient(
                admin, token=token, timeout_seconds=timeout, tls=security
            ) as client:
                yield Context(client, as_json=json)
        except Unauthenticated as error:
            raise Unauthenticated(
                f"router {admin}: {error}; give the token in TRTMESH_ADMIN_TOKEN or with --token-file"
            ) from error
