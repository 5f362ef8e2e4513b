"""The commands that the README tells operators are commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from trtmesh.cli.app import app

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## Operating a router\n")[1].split("\n## ")[0]
LINES = [
    line.partition(" trtmesh ")[2] or line.removeprefix("trtmesh ")
    for block in re.findall(r"```\n(.*?)```", SECTION, re.DOTALL)
    for line in block.splitlines()
    if re.match(r"([A-Z_]+=\S+ )?trtmesh ", line)
]


def test_the_section_has_commands() -> None:
    assert len(LINES) >= 10


@pytest.mark.parametrize("line", LINES)
def test_the_command_line_is_understood(line: str) -> None:
    """Parses as the command does, without running it; what it does not know raises."""
    words = shlex.split(line, comments=True)
    # Any: typer brings its own click or uses the installed one, by its version.
    command: Any = typer.main.get_command(app)
    context: Any = None
    if words == ["--install-completion"]:
        assert any("--install-completion" in option.opts for option in command.params)
        return
    while hasattr(command, "resolve_command"):
        context = command.context_class(command, info_name=command.name, parent=context)
        _, command, words = command.resolve_command(context, words)
    assert command.make_context(command.name, words, parent=context).params
