"""`trtmesh doctor`: checks a running mesh, or the configuration of services. Changes nothing, and shows no secret."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from trtmesh.chassis.errors import SettingsError
from trtmesh.cli.admin_command import AdminOptions
from trtmesh.cli.option_groups import grouped
from trtmesh.cli.output import put, put_json
from trtmesh.cli.session import run
from trtmesh.cli.tables import add_row, new_table, print_tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trtmesh.tools.checkup.findings import Symptom

NAME_SECONDS = 3.0
"""Longest wait for a name server."""
OF_CONFIGURATIONS = {"--config", "--service", "--json"}
"""Options of a check before services start; all others are for a router that runs."""


@grouped
def doctor(
    context: typer.Context,
    connection: AdminOptions,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with the sections mesh, router, tokenizer and engine."),
    ] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(
            help="Service to check by its command line, such as 'engine --role decode'; repeatable. Variables count."
        ),
    ] = None,
) -> None:
    """Check a running mesh, or the configuration of its services, and say what to do.

    Exit status: 0 nothing but notes, 5 warnings, 6 errors, 2 wrong usage, 130 Ctrl-C.
    """
    if config or service:
        others = [each for each in given_options(context) if each not in OF_CONFIGURATIONS]
        run(_check_config(config, service or (), others, as_json=connection.as_json))
    else:
        run(_check_mesh(connection))


def given_options(context: typer.Context) -> list[str]:
    """The options of the command line."""
    return [
        each.opts[0]
        for each in context.command.params
        if (source := context.get_parameter_source(each.name or ""))
        and source.name == "COMMANDLINE"
    ]


async def _check_mesh(connection: AdminOptions) -> int:
    from trtmesh.tools.checkup.mesh_checks import MESH_CHECKS
    from trtmesh.tools.checkup.mesh_facts import collect_mesh

    client, tls = connection.client()
    async with client:
        facts = await collect_mesh(client, tls, connection.timeout)
    found = [each for check in MESH_CHECKS for each in check(facts)]
    return _tell(found, as_json=connection.as_json)


async def _check_config(
    file: Path | None, services: Sequence[str], others: Sequence[str], *, as_json: bool
) -> int:
    if others:
        problem = "is for a router that runs; --config and --service check services that do not"
        raise SettingsError(problem, setting=others[0])
    from trtmesh.tools.checkup.config_checks import CONFIG_CHECKS
    from trtmesh.tools.checkup.config_facts import collect_config

    facts = await collect_config(file, services, os.environ, NAME_SECONDS)
    return _tell([each for check in CONFIG_CHECKS for each in check(facts)], as_json=as_json)


def _tell(found: Sequence[Symptom], *, as_json: bool) -> int:
    """Prints the findings. Returns the exit status."""
    from trtmesh.tools.checkup.findings import SCHEMA_VERSION, exit_status
    from trtmesh.tools.checkup.rules import told

    findings = told(found)
    status = exit_status(findings)
    if as_json:
        listed = [each._asdict() for each in findings]
        put_json({"schema_version": SCHEMA_VERSION, "exit_status": status, "findings": listed})
    elif findings:
        table = new_table("severity", "where", "what", "remedy", remark="remedy")
        for each in findings:
            add_row(table, each.severity, each.where, each.what, each.remedy)
        print_tables(table)
    else:
        put("nothing is wrong")
    return status
