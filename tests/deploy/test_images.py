"""The build context of the images, and machines without a container engine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from deploy.images import kept_files, why_not


def files(directory: Path) -> dict[str, str]:
    paths = (path for path in directory.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(directory)): path.read_text() for path in paths}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("deploy.images.ROOT", tmp_path)
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "kept.py").write_text("as added")
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_untracked_files_are_left_out(repository: Path) -> None:
    for command in ("init", "add ."):
        subprocess.run(["git", "-C", str(repository), *command.split()], check=True)
    (repository / "services" / "kept.py").write_text("as changed since")
    (repository / "services" / "untracked.py").write_text("")
    with kept_files() as context:
        assert files(context) == {"services/kept.py": "as changed since"}


def test_release_without_history_is_built_as_it_is(repository: Path) -> None:
    with kept_files() as context:
        assert files(context) == {"services/kept.py": "as added"}


def test_repository_is_built_as_it_is_without_git(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    with kept_files() as context:
        assert files(context) == {"services/kept.py": "as added"}


def test_missing_container_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_ENGINE", "no-such-engine")
    assert why_not().startswith("no-such-engine: ")


def test_missing_compose_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTAINER_ENGINE", "true")
    monkeypatch.setenv("COMPOSE", "no-such-compose --quiet")
    assert why_not().startswith("no-such-compose: ")
