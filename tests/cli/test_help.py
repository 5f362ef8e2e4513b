"""What the command says of itself: help, and the command that was probably meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from cli.commands import loaded
from trtmesh.cli.app import OPERATE, PREPARE, SERVE, USE, app
from trtmesh.cli.tls import CONNECTION
from typer.testing import CliRunner

CONNECTION_OPTIONS = {
    *("router", "url", "admin", "api_key_file", "token_file", "tls", "ca", "cert", "key"),
    *("server_name", "root_certificates", "private_key", "certificate_chain", "host", "port"),
}
"""Parameters that say how a command reaches a server."""


def told(*words: str) -> tuple[int, str]:
    """Exit status and output, without line breaks."""
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    return result.exit_code, " ".join(result.output.split())


def test_commands_stand_in_groups_with_examples() -> None:
    _, text = told("--help")
    titles = [text.index(f" {title}: {first} ") for title, first in (
        (SERVE, "up"), (USE, "generate"), (OPERATE, "status"), (PREPARE, "import-triton"),
    )]  # fmt: skip
    assert titles == sorted(titles)
    examples = text[text.index("Examples: ") :]
    assert "trtmesh up --model DIR trtmesh generate" in examples


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("serve",), "trtmesh up --model DIR"),
        (("complete", "hi"), "trtmesh generate PROMPT"),
        (("genrate", "hi"), "trtmesh generate"),
        (("up", "models/demo"), "--model models/demo"),
        (("up", "--engines", "2", "models/demo"), "--model models/demo"),
        (("demo", "models/demo"), "--model models/demo"),
    ],
)
def test_the_command_that_was_meant_is_named(words: tuple[str, ...], meant: str) -> None:
    status, text = told(*words)
    assert status == 2
    assert f"did you mean `{meant}" in text or f"{meant}`?" in text


def commands() -> Iterator[tuple[str, Any]]:
    def below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
        for name, each in getattr(command, "commands", {}).items():
            yield from below(f"{path} {name}", loaded(each))
        if not hasattr(command, "commands"):
            yield path.strip(), command

    yield from below("", typer.main.get_command(app))


@pytest.mark.parametrize(("path", "command"), [*commands()])
def test_options_of_the_connection_come_last(path: str, command: Any) -> None:
    """In a group of their own, which follows the others; `keys` connects to nothing."""
    if path.startswith("keys "):
        return
    groups = {each.name: each.rich_help_panel for each in command.params}
    own = groups.keys() & CONNECTION_OPTIONS
    assert {groups[name] for name in own} <= {CONNECTION}
    if own:
        _, text = told(*path.split(), "--help")
        assert text.index(" Options: ") < text.index(f" {CONNECTION}: -")


def test_an_option_means_one_thing_in_every_command() -> None:
    """`--config` is a file of settings everywhere, and no option is called `--key` alone: keys are of two kinds."""
    found = {
        option: path
        for path, command in commands()
        for each in command.params
        for option in each.opts
        if option in ("--config", "--key")
    }
    assert found.keys() == {"--config"}
    assert found["--config"] in ("demo", "doctor", "up")
