"""Tiny models, each built once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import tiny_models

ModelDir = Callable[[str], Path]


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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Used where a test names this folder or one of the files; the default applies elsewhere."""
    parser.addoption("--combinations", type=int, help="rounds of test_any_combination")
