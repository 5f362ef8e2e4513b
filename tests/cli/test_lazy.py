"""Commands whose modules are imported when they are used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from trtmesh.cli import adapters
from trtmesh.cli.app import COMMANDS
from trtmesh.cli.lazy import LazyCommand

PROGRAM = """
import json, os, sys
say = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
from trtmesh.cli.main import main
try:
    main()
except SystemExit:
    os.write(say, json.dumps(sorted(sys.modules)).encode())
"""
NEVER = {"torch", "numpy", "tokenizers", "transformers", "aiohttp", "cryptography"}


@pytest.mark.parametrize(
    "command", [*COMMANDS, *adapters.AdapterCommands.lazy], ids=lambda c: c.name
)
def test_the_help_of_a_group_is_that_of_its_commands(command: LazyCommand) -> None:
    itself = command.load()
    assert itself.name == command.name
    assert itself.help.split("\n\n")[0] == command.help
    assert itself.get_short_help_str() == command.get_short_help_str()


@pytest.mark.parametrize(
    ("words", "most", "without"),
    [
        ("--help", 9, {"grpc", "google.protobuf", "pydantic", "asyncio"}),
        ("bench serve --help", 42, {"rich", "pydantic", "google.protobuf", "trtmesh.client"}),
        ("status --admin 127.0.0.1:1", 53, {"trtmesh.router", "trtmesh.tools", "yaml"}),
        ("keys list --file /nonexistent", 58, {"trtmesh.tools", "trtmesh.engine"}),
        ("convert /nonexistent", 51, {"trtmesh.router", "trtmesh.engine", "yaml"}),
    ],
)
def test_a_command_imports_only_what_it_runs(words: str, most: int, without: set[str]) -> None:
    """Counts modules of the product; an import of all commands took 135."""
    run = [sys.executable, "-c", PROGRAM, *words.split()]
    found = json.loads(subprocess.run(run, capture_output=True, check=True).stdout)
    assert (NEVER | without).isdisjoint(found)
    assert len([name for name in found if name.startswith("trtmesh")]) <= most
