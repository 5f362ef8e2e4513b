"""The stand-in of each release, imported as the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from engine.tensorrt_llm.stand_in.package import RELEASES, write_package


def forget() -> None:
    """Lets the next import find another release."""
    for name in [each for each in sys.modules if each.split(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """By release: each is written, and its byte code made, once."""
    directory = tmp_path_factory.mktemp("library")
    return {release: write_package(directory / release, release) for release in RELEASES}


def installed(packages: Mapping[str, Path], release: str) -> Iterator[str]:
    """A release that this process imports."""
    forget()
    path = str(packages[release])
    sys.path.insert(0, path)
    yield release
    sys.path.remove(path)
    forget()


@pytest.fixture(params=RELEASES)
def release(request: pytest.FixtureRequest, packages: Mapping[str, Path]) -> Iterator[str]:
    """Each release in turn."""
    yield from installed(packages, request.param)


@pytest.fixture
def target(packages: Mapping[str, Path]) -> Iterator[str]:
    """The release that the backend is written for."""
    yield from installed(packages, RELEASES[0])


@pytest.fixture
def newer(packages: Mapping[str, Path]) -> Iterator[str]:
    """The newest release with published signatures."""
    yield from installed(packages, RELEASES[1])
