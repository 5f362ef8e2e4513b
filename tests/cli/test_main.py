"""The `trtmesh` command without a command."""

from __future__ import annotations

from importlib.metadata import version

from cli.commands import trtmesh


def test_version_is_that_of_the_package() -> None:
    result = trtmesh("--version")
    assert (result.returncode, result.stdout) == (0, f"trtmesh {version('trtmesh')}\n")


def test_without_a_command_prints_the_help() -> None:
    result = trtmesh()
    assert "generate" in result.stdout + result.stderr
