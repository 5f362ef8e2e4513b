"""Conversions of repositories, and the models of the conversions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from e2e.mesh import DEMO
from trtmesh.tools.triton_import import Conversion, Outcome, convert_repository


def convert(
    directory: Path, *models: str, device: str = "", values: Mapping[str, str] | None = None
) -> Conversion:
    parts = (text.rpartition("=") for text in models)
    given = {name: Path(path) for name, _, path in parts}
    return convert_repository(directory, given, device, values)


def finding(conversion: Conversion, model: str, what: str) -> tuple[Outcome, str]:
    """The outcome of a value, with the reason."""
    (found,) = [f for f in conversion.findings if (f.model, f.what) == (model, what)]
    return found.outcome, found.text


def copy_of_demo(directory: Path) -> Path:
    """A copy of the demo model under another name."""
    directory.mkdir(parents=True)
    for file in DEMO.iterdir():
        (directory / file.name).symlink_to(file)
    return directory
