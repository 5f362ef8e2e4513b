"""Tiny models, each built once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle import tiny_models

ModelDir = Callable[[str], Path]
Device = dict[str, Any]
"""Settings of a backend."""


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> ModelDir:
    """The directory of a tiny model of a family."""
    built: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in built:
            built[family] = tiny_models.build(tmp_path_factory.mktemp(family), family)
        return built[family]

    return directory


@pytest.fixture(scope="session")
def llama(model_dir: ModelDir) -> Path:
    return model_dir("llama")


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.slow])])
def device(request: pytest.FixtureRequest) -> Device:
    """Settings for a CPU and, in runs of the marker `gpu`, for a GPU."""
    return _on_a_gpu(request) if request.param == "gpu" else {}


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Device:
    """Settings for a GPU alone."""
    return _on_a_gpu(request)


def _on_a_gpu(request: pytest.FixtureRequest) -> Device:
    name = request.config.getoption("--gpu", default="cuda:0")
    # A graph is captured for each of many sizes of a step, up to the largest.
    return {"device": name, "dtype": "float32", "max_batch_size": 20}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Used where a test names this folder or one of the files; the default applies elsewhere."""
    parser.addoption("--combinations", type=int, help="rounds of test_any_combination")
    parser.addoption(
        "--gpu", default="cuda:0", help="device of the tests of the marker gpu; cpu tries them out"
    )
    parser.addoption("--soak-requests", type=int, help="requests of test_soak on a GPU")
    parser.addoption("--soak-minutes", type=float, help="the soak ends after so long in any case")
