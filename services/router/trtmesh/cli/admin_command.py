"""Options, connection and errors of the commands that call a router's admin address."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from trtmesh.chassis.errors import Unauthenticated, Unavailable, Unsupported, UnsupportedCall
from trtmesh.cli.session import run
from trtmesh.client import DEFAULT_ADMIN_ADDRESS, AdminClient, read_admin_token


@dataclass(frozen=True, slots=True)
class Context:
    admin: AdminClient
    as_json: bool


Command = Callable[..., Coroutine[Any, Any, int]]


def admin_command(command: Command) -> Callable[..., None]:
    """Makes a typer command of `async command(context, own options) -> exit status`: adds options of the connection,
    connects, and prints errors."""

    def with_options(**values: Any) -> None:
        given = {name: values.pop(name) for name in _OPTIONS}
        run(_run(command, given, values))

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    signature = inspect.Signature([*own, *_OPTIONS.values()])
    functools.update_wrapper(with_options, command, assigned=("__name__", "__doc__", "__module__"))
    with_options.__annotations__ = {n: p.annotation for n, p in signature.parameters.items()}
    with_options.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return with_options


async def _run(command: Command, given: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    async with _connected(given["admin"], given["token_file"], given["timeout"]) as admin:
        return await command(Context(admin, as_json=given["json"]), **own)


@asynccontextmanager
async def _connected(
    address: str, token_file: Path | None, timeout_seconds: float
) -> AsyncIterator[AdminClient]:
    """Connects to a router; errors name its address and the remedy."""
    token = read_admin_token(token_file, os.environ)
    try:
        async with AdminClient(address, token=token, timeout_seconds=timeout_seconds) as admin:
            yield admin
    except Unauthenticated as error:
        raise Unauthenticated(
            f"router {address}: {error}; give the token in TRTMESH_ADMIN_TOKEN or with --token-file"
        ) from error
    except Unavailable as error:
        if type(error) is not Unavailable:
            raise
        raise Unavailable(
            f"router {address}: {error}; `trtmesh up` starts a stack, --admin names another router's admin address"
        ) from error
    except Unsupported as error:
        if type(error) is not Unsupported:
            raise
        raise UnsupportedCall(
            f"{address} does not serve this: {error}; --admin must name the admin address of a router"
            " (router.admin.port), not its address for clients"
        ) from error


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


_OPTIONS = {
    option.name: option
    for option in (
        _option(
            "admin",
            Annotated[
                str,
                typer.Option(
                    envvar="TRTMESH_ADMIN", help="Admin address of the router, host:port."
                ),
            ],
            default=DEFAULT_ADMIN_ADDRESS,
        ),
        _option(
            "token_file",
            Annotated[
                Path | None,
                typer.Option(
                    help="File with the router's admin token; unset means TRTMESH_ADMIN_TOKEN."
                ),
            ],
            default=None,
        ),
        _option(
            "timeout",
            Annotated[
                float,
                typer.Option(min=0.1, max=86400, help="Longest silence of the router, in seconds."),
            ],
            default=10.0,
        ),
        _option(
            "json",
            Annotated[
                bool,
                typer.Option(
                    "--json", help="One JSON object per line, with the field names of the protos."
                ),
            ],
            default=False,
        ),
    )
}
