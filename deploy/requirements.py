"""Prints the requirements of trtmesh with the named extras, one a line, or with --metadata its name and version.

An image installs from this list before it takes the code, so that a change of the code installs nothing again.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    if extras == ["--metadata"]:
        print(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}")
        return
    lists = [project["dependencies"], *(project["optional-dependencies"][name] for name in extras)]
    print(
        "\n".join(sorted({requirement for requirements in lists for requirement in requirements}))
    )


if __name__ == "__main__":
    main(sys.argv[1:])
