"""The `trtmesh` command without a command."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from cli.commands import trtmesh

IN_THE_IMAGE_OF_A_ROUTER = """
import sys
sys.modules["trtmesh.engine"] = None
from trtmesh.cli.main import main
main()
"""


def test_version_is_that_of_the_package() -> None:
    result = trtmesh("--version")
    assert (result.returncode, result.stdout) == (0, f"trtmesh {version('trtmesh')}\n")


def test_without_a_command_prints_the_help() -> None:
    result = trtmesh()
    assert "generate" in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["doctor --config", "replay"])
def test_a_command_names_the_code_that_an_image_lacks(command: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("router: {engines: ['a:1'], tokenizers: ['b:1']}")
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_IMAGE_OF_A_ROUTER, *command.split(), str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("trtmesh: error: this command needs trtmesh.engine")
    assert "Traceback" not in done.stderr
