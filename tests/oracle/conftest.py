"""A tiny model for the oracles of single features."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from oracle import tiny_models
from oracle.adapters import Adapted


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds an option for command lines with this folder or a file in it."""
    parser.addoption("--forms", type=int, help="seed of blocks and chunks in test_handoffs")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Adapted]:
    """The adapted model of a family."""

    def build(family: str) -> Adapted:
        model_dir = tiny_models.build(tmp_path_factory.mktemp(family), family)
        return Adapted(model_dir, family, tmp_path_factory.mktemp(f"{family}-lora"))

    return cache(build)
