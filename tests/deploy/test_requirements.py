"""What the images install."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
HEAVY = {"numpy", "torch", "transformers", "tokenizers", "tritonclient"}
BLOCKED = f"""
import sys
for name in {sorted(HEAVY)}:
    sys.modules[name] = None
import trtmesh.router.__main__, trtmesh.router.router, trtmesh.tools.triton_import
from trtmesh.cli.app import COMMANDS
for command in COMMANDS:
    command.load()
"""


def installed_with(*extras: str) -> set[str]:
    """Names of all distributions that an image installs, dependencies of dependencies included."""
    script = [sys.executable, "deploy/requirements.py", *extras]
    listed = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    waiting = [Requirement(line) for line in listed.splitlines()]
    found: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = wanted.name.lower().replace("_", "-")
        # A distribution can come again with another extra.
        key = name + "".join(sorted(wanted.extras))
        if key in found or not _applies(wanted, ""):
            continue
        found |= {key, name}
        for line in requires(name) or ():
            needed = Requirement(line)
            if any(_applies(needed, extra) for extra in ("", *wanted.extras)):
                needed.marker = None
                waiting.append(needed)
    return found


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def test_router_image_has_no_heavy_library() -> None:
    installed = installed_with()
    assert {"grpcio", "aiohttp", "yarl"} <= installed
    assert installed & HEAVY == set()


def test_requirements_are_followed_to_the_end() -> None:
    assert {"torch", "numpy", "sympy"} <= installed_with("engine")


def test_router_starts_without_heavy_libraries() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED], check=True)
