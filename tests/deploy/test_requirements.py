"""What the images install."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions, requires, version
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
    installed = installed_with("otel")
    assert {"grpcio", "aiohttp", "yarl", "opentelemetry-sdk"} <= installed
    assert installed & HEAVY == set()


def test_requirements_are_followed_to_the_end() -> None:
    assert {"torch", "numpy", "sympy"} <= installed_with("engine")


def test_router_starts_without_heavy_libraries() -> None:
    subprocess.run([sys.executable, "-c", BLOCKED], check=True)


def test_an_image_knows_its_version(tmp_path: Path) -> None:
    """Code alone, which is not installed, has none."""
    script = [sys.executable, "deploy/requirements.py", "--metadata"]
    written = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (tmp_path / "trtmesh.dist-info").mkdir()
    (tmp_path / "trtmesh.dist-info" / "METADATA").write_text(written, "utf-8")
    (found,) = distributions(name="trtmesh", path=[str(tmp_path)])
    assert found.version == version("trtmesh")
    for file in (ROOT / "deploy").glob("*.Dockerfile"):
        text = file.read_text("utf-8")
        copied = "COPY --from=requirements /build/METADATA /app/trtmesh.dist-info/METADATA\n"
        assert (copied in text) == ("PYTHONPATH=/app" in text), file.name


def test_images_may_copy_what_they_copy() -> None:
    """Of the repository they see what .dockerignore lets through."""
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    seen = [line[1:] for line in ignored if line.startswith("!")]
    for file in (ROOT / "deploy").glob("*.Dockerfile"):
        if file.name == "model.Dockerfile":
            # Its context is the directory of a model.
            continue
        for line in file.read_text("utf-8").splitlines():
            if line.startswith("COPY ") and "--from" not in line:
                for source in line.split()[1:-1]:
                    assert source.startswith(tuple(seen)), f"{file.name}: {source}"
