"""`trtmesh demo`: a stack, a request, and the next commands to try."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from trtmesh.cli.generate import Request, stream
from trtmesh.cli.mesh_settings import Flags, takes_mesh_flags
from trtmesh.cli.output import put, say
from trtmesh.cli.session import run
from trtmesh.cli.stack import Stack
from trtmesh.cli.streams import choose_printer
from trtmesh.cli.supervisor import supervise
from trtmesh.client import ApiKey, Client, ClientTls, GenerationConfig
from trtmesh.client.options import build_config

PROMPTS = ("def load_json(path):", "def get_logger(name):", "def read_lines(path):")
# Quiet processes: the streams have the terminal to themselves.
DEFAULTS = {"engines": "2", "log_level": "warning"}


@takes_mesh_flags
def demo(
    flags: Flags,
    *,
    exit_after: Annotated[
        bool, typer.Option("--exit", help="End after the request instead of serving.")
    ] = False,
) -> None:
    """Start a stack with two engines, stream three prompts, then serve until Ctrl-C.

    Takes the options of `trtmesh up`. Exit status: the same, and 1 for a failed prompt.
    """

    async def use(stack: Stack) -> int:
        ca = stack.plan.ca
        status = await _request(stack.router.address, ClientTls(ca) if ca else None)
        if exit_after or status:
            return status
        _say_how_to_go_on(stack.router.address, stack.router.admin_address, ca)
        await asyncio.Event().wait()
        return status

    say("starting the stack ...")
    run(supervise(flags, use, DEFAULTS))


async def _request(router: str, tls: ClientTls | None) -> int:
    put(f"three prompts in one request to {router}, each line after its batch_index:\n")
    request = Request(PROMPTS, _config())
    printer = choose_printer(
        as_json_lines=False, items=len(PROMPTS), sequences=1, console=Console()
    )
    api_key = ApiKey.read(None, os.environ)
    async with Client(router, tls=tls, api_key=api_key) as client:
        return await stream(client, request, printer)


def _config() -> GenerationConfig:
    return build_config(None, {"max_tokens": 96, "stop_texts": ["\n\n\n"]})


def _say_how_to_go_on(router: str, admin: str, ca: Path | None) -> None:
    option = f" --ca {ca}" if ca else ""
    argument = f", tls=ClientTls(ca={str(ca)!r})" if ca else ""
    names = "Client, ClientTls" if ca else "Client"
    put(
        f"""
The stack keeps serving until Ctrl-C. From another terminal:

    {sys.argv[0]} generate --router {router}{option} --max-tokens 64 'def load_json(path):' 'def get_logger(name):'
    {sys.argv[0]} status --admin {admin}{option}

From Python, with {sys.executable}:

    import asyncio
    from trtmesh.client import {names}

    async def main():
        async with Client("{router}"{argument}) as client:
            for item in await client.complete(["def load_json(path):"], max_tokens=51):
                print(item.text)

    asyncio.run(main())
"""
    )
