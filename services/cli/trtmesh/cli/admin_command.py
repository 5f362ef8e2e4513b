"""Options, connection, output and errors of the admin commands."""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from inspect import Parameter
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from rich.table import Table
from trtmesh.chassis.connecting import check_address
from trtmesh.chassis.errors import Unauthenticated
from trtmesh.chassis.quoting import escaped
from trtmesh.cli.option_groups import option, with_options
from trtmesh.cli.output import as_fields, put, put_json
from trtmesh.cli.session import OK, AddressOption, address_explained, run
from trtmesh.cli.stacks import stack_meant
from trtmesh.cli.tables import print_tables
from trtmesh.cli.tls import CONNECTION, TlsOptions
from trtmesh.client import DEFAULT_ADMIN_ADDRESS, AdminClient, AdminToken, ClientTls

ADMIN = AddressOption(
    "--admin", "TRTMESH_ADMIN", "router", "a router's admin address (router.admin.port, here 8003)"
)


@dataclass(frozen=True, slots=True)
class Context:
    admin: AdminClient
    as_json: bool

    def answer(self, message: Message, *shown: str | Table) -> int:
        """Prints an answer, as JSON or as lines and tables. Returns the exit status."""
        return self.answer_each((message,), *shown)

    def answer_each(self, messages: Iterable[Message], *shown: str | Table) -> int:
        """Prints several messages as JSON, or all of them as lines and tables. Returns the exit status."""
        if self.as_json:
            for message in messages:
                put_json(as_fields(message))
            return OK
        for part in shown:
            if isinstance(part, str):
                put(escaped(part))
            else:
                print_tables(part)
        return OK


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Options of every admin command."""

    admin: str | None = option(
        f"Admin address of the router, host:port; unset, that of your stack, else {DEFAULT_ADMIN_ADDRESS}.",
        envvar="TRTMESH_ADMIN",
        panel=CONNECTION,
    )
    token_file: Path | None = option(
        "File with the router's admin token; unset means TRTMESH_ADMIN_TOKEN.", panel=CONNECTION
    )
    timeout: float = option(
        "Longest silence of the router, in seconds.",
        default=10.0,
        min=0.1,
        max=86400,
        panel=CONNECTION,
    )
    tls: TlsOptions = field(default_factory=TlsOptions)
    as_json: bool = option(
        "One JSON object per line, with the field names of the protos.", "--json", default=False
    )

    def client(self) -> tuple[AdminClient, ClientTls | None]:
        """A client that is not open yet, and its TLS. Raises SettingsError."""
        token = AdminToken.read(self.token_file, os.environ)
        address, tls = self.admin, self.tls.client_tls()
        if address is None:
            stack = stack_meant(ADMIN.setting)
            address, tls = stack.admin, stack.tls(tls)
        check_address(address, ADMIN.setting)
        client = AdminClient(address, token=token, timeout_seconds=self.timeout, tls=tls)
        return client, tls

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Context]:
        """Connects to the router; errors name the address and the remedy."""
        client, _ = self.client()
        with address_explained(client.address, ADMIN):
            try:
                async with client:
                    yield Context(client, self.as_json)
            except Unauthenticated as error:
                raise Unauthenticated(
                    f"router {client.address}: {error}; give the token in TRTMESH_ADMIN_TOKEN or with --token-file"
                ) from error


def admin_command(command: Callable[..., Coroutine[Any, Any, int]]) -> Callable[..., None]:
    """Makes a typer command of `async command(context, own options) -> exit status`: adds options of the connection,
    connects, and prints errors."""

    async def call(options: AdminOptions, **values: Any) -> int:
        async with options.connected() as context:
            return await command(context, **values)

    def start(**values: Any) -> None:
        run(call(**values))

    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    options = Parameter("options", Parameter.KEYWORD_ONLY, annotation=AdminOptions)
    return with_options(start, [*own, options], like=command)
