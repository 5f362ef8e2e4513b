"""`trtmesh policy`: the placement policy of a router."""

from __future__ import annotations

from typing import Annotated

import typer
from trtmesh.chassis.errors import InvalidField
from trtmesh.cli.admin_command import Context, admin_command
from trtmesh.cli.completion import complete_policy
from trtmesh.cli.output import put, put_json, say_error
from trtmesh.cli.session import OK, USAGE

policy = typer.Typer(name="policy", help="The placement policy of a router.", no_args_is_help=True)


@policy.command("get")
@admin_command
async def get_policy(context: Context) -> int:
    """Print all policies and mark the current one."""
    response = await context.admin.get_policy()
    if context.as_json:
        put_json(response)
    else:
        for name in response.available:
            put(f"{'*' if name == response.policy else ' '} {name}")
    return OK


@policy.command("set")
@admin_command
async def set_policy(
    context: Context,
    policy: Annotated[
        str, typer.Argument(help="One of `policy get`.", autocompletion=complete_policy)
    ],
) -> int:
    """Change the policy until the router ends.

    Exit status: 0 changed, 1 the call failed, 2 unknown policy or other wrong usage.
    """
    try:
        response = await context.admin.set_policy(policy)
    except InvalidField as error:
        say_error(f"{error.reason}: {error}")
        return USAGE
    if context.as_json:
        put_json(response)
    else:
        put(f"policy {policy}, {response.previous} until now")
    return OK
