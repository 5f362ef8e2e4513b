"""The wheel, outside of the repository: unpacked into a new virtual environment, with the dependencies of this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from cli.commands import FREE_PORTS, STOP_SECONDS
from e2e.mesh import DEMO

ROOT = Path(__file__).parents[2]
PROGRAM = "from trtmesh.cli.main import main; main()"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packages of an environment without the dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    venv.create(folder / "environment", symlinks=True)
    paths = {"base": str(folder / "environment"), "platbase": str(folder / "environment")}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return packages


@pytest.fixture(scope="module")
def installed(site: Path) -> Path:
    """The environment's Python, with the dependencies of this one and nothing of the repository."""
    found = [Path(path) for path in sys.path if Path(path).name == "site-packages"]
    # The lines of a .pth file are directories; the .pth files in these are not read.
    (site / "dependencies.pth").write_text("".join(f"{path}\n" for path in found))
    return site.parents[2] / "bin" / "python"


def trtmesh(
    python: Path, folder: Path, *arguments: str, prelude: str = ""
) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-c", prelude + PROGRAM, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def test_wheel_has_the_files_of_the_packages_and_no_others(site: Path) -> None:
    """So that a backend whose start takes long is there too."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    folders = [ROOT / each for each in targets["targets"]["wheel"]["packages"]]
    assert {*ROOT.glob("services/*/trtmesh")} < {*folders}
    outside = {each for each in site.iterdir() if each.suffix not in (".dist-info", ".pth")}
    assert outside == {site / "trtmesh"}
    parts = {each.name for folder in folders for each in folder.iterdir() if each.is_dir()}
    assert {each.name for each in (site / "trtmesh").iterdir()} == parts - {"__pycache__"}
    files = [
        file.relative_to(folder)
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file()
    ]
    missing = [
        str(file)
        for file in files
        if "__pycache__" not in file.parts and not (site / "trtmesh" / file).exists()
    ]
    assert missing == []


def test_up_without_a_model_says_what_to_do(installed: Path, tmp_path: Path) -> None:
    result = trtmesh(installed, tmp_path, "up", *FREE_PORTS)
    assert result.returncode == 4
    assert "--model DIR (hf download " in result.stderr


def test_up_without_the_extras_names_them(installed: Path, tmp_path: Path) -> None:
    hidden = "import sys; sys.modules.update(tokenizers=None, torch=None);"
    given = (*FREE_PORTS, "--backend", "torch", "--model", str(DEMO))
    result = trtmesh(installed, tmp_path, "up", *given, prelude=hidden)
    assert result.returncode == 1
    assert "pip install 'trtmesh[tokenizer,engine]'" in result.stderr


@pytest.mark.parametrize("backend", ["simulated", pytest.param("torch", marks=pytest.mark.soak)])
def test_up_serves_a_given_model(installed: Path, tmp_path: Path, backend: str) -> None:
    flags = (*FREE_PORTS, "--model", str(DEMO), "--backend", backend)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [str(installed), "-c", PROGRAM, "up", *flags],
        cwd=tmp_path,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    ) as stack:
        try:
            assert stack.stdout
            router = next(line for line in stack.stdout if line.startswith("ready:")).split()[4]
            ask = ("--router", router, "--max-tokens", "4", "def f():")
            result = trtmesh(installed, tmp_path, "generate", *ask)
            assert result.returncode == 0, result.stderr
            assert result.stdout.strip()
            stack.send_signal(signal.SIGINT)
            assert stack.wait(STOP_SECONDS) == 0
        finally:
            stack.kill()
