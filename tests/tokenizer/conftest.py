"""Model directories of real tokenizers, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizer.tokenizers_zoo import ZOO, save_model_dir


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model directory for each tokenizer of the zoo."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model_dir(build(), root / name) for name, (build, _) in ZOO.items()}


@pytest.fixture
def model_dir(model_dirs: dict[str, Path]) -> Path:
    """A byte-level BPE."""
    return model_dirs["byte_level_bpe"]
