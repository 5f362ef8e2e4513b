"""The commands that the pages tell users to type are commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli.commands import Stack, running_stack, trtmesh
from e2e.mesh import DEMO
from trtmesh.cli.app import app

REPOSITORY = Path(__file__).parents[2]
PAGES = {"README.md": 15, "docs/triton.md": 9, "deploy/README.md": 1}
"""How many commands each has at least."""


def commands_of(page: str) -> list[str]:
    """What stands behind `trtmesh` in the lines of its blocks, with or without a path and variables before it."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    typed = "".join(block for language, block in blocks if not language)
    return re.findall(r"^(?:\w+=\S+ |\S+/)*trtmesh (.*)", typed, re.MULTILINE)


@pytest.mark.parametrize(("page", "least"), PAGES.items())
def test_a_page_has_commands(page: str, least: int) -> None:
    assert len(commands_of(page)) >= least


@pytest.mark.parametrize("line", [line for page in PAGES for line in commands_of(page)])
def test_a_command_line_is_understood(line: str) -> None:
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


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """What a reader has who followed the page: the demo model, computed."""
    with running_stack("--port", "0", "--backend", "torch", "--model", str(DEMO)) as stack:
        stack.wait_ready()
        yield stack


@pytest.mark.parametrize(
    "line", [line for line in commands_of("docs/triton.md") if line.startswith("triton infer ")]
)
def test_a_question_of_the_page_is_answered(stack: Stack, line: str) -> None:
    words = shlex.split(line, comments=True)
    result = trtmesh(*words, env={"TRTMESH_ROUTER": stack.wait_ready()})
    assert (result.returncode, result.stderr) == (0, "")
    if "--generation-logits" in words:
        assert re.search(r"^generation_logits \[1, 2, \d+, \d+\]", result.stdout, re.MULTILINE)
