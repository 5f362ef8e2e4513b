"""The stand-in of each release, imported as the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.tensorrt_llm.stand_in.package import RELEASES, write_package


def forget() -> None:
    """Lets the next import find another release."""
    for name in [each for each in sys.modules if each.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def installed(directory: Path, release: str) -> Iterator[str]:
    """A release that this process imports."""
    forget()
    path = str(write_package(directory, release))
    sys.path.insert(0, path)
    yield release
    sys.path.remove(path)
    forget()


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Each release in turn."""
    yield from installed(tmp_path / "library", request.param)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    """The release that the backend is written for."""
    yield from installed(tmp_path / "library", RELEASES[0])


@pytest.fixture
def newer(tmp_path: Path) -> Iterator[str]:
    """The newest release with published signatures."""
    yield from installed(tmp_path / "library", RELEASES[1])
