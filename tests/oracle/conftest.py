"""A tiny model for the oracles of single features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle import tiny_models


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("llama"), "llama")
