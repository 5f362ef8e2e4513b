"""The stand-in of each release, imported as the library."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from engine.tensorrt_llm.harness import DEMO
from engine.tensorrt_llm.stand_in.package import RELEASES, write_package
from trtmesh.chassis.fingerprint import tokenizer_fingerprint
from trtmesh.engine.backends.tensorrt_llm import model_files
from trtmesh.engine.model_fingerprint import model_fingerprint

_imported: dict[str, dict[str, ModuleType]] = {}
"""The modules of each release, while no test uses them: half of a short test is their import."""


def forget() -> dict[str, ModuleType]:
    """Lets the next import find another release. Returns the modules."""
    names = [each for each in sys.modules if each.split(".")[0] == "tensorrt_llm"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(autouse=True, scope="module")
def demo_is_hashed_once() -> Iterator[None]:
    """Most of the rest is the fingerprints of the demo model and of its tokenizer."""
    with pytest.MonkeyPatch.context() as patching:
        for hashing in (model_fingerprint, tokenizer_fingerprint):
            patching.setattr(model_files, hashing.__name__, _hashing_demo_once(hashing))
        yield


def _hashing_demo_once(hashing: Any) -> Any:
    @cache
    def of_demo(*given: Any) -> str:
        return str(hashing(DEMO, *given))

    def fingerprint(model_dir: Path, *given: Any) -> str:
        if model_dir != DEMO:
            return str(hashing(model_dir, *given))
        return of_demo(*(tuple(each) if isinstance(each, list) else each for each in given))

    return fingerprint


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """By release: each is written, and its byte code made, once."""
    directory = tmp_path_factory.mktemp("library")
    return {release: write_package(directory / release, release) for release in RELEASES}


def installed(packages: Mapping[str, Path], release: str) -> Iterator[str]:
    """A release that this process imports."""
    forget()
    sys.modules.update(_imported.pop(release, {}))
    path = str(packages[release])
    sys.path.insert(0, path)
    yield release
    sys.path.remove(path)
    modules = _imported[release] = forget()
    if machine := modules.get("tensorrt_llm._stand_in.machine"):
        vars(machine)["EXECUTORS"].clear()


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
