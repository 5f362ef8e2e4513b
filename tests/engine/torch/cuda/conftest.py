"""Kernels run on the GPU, or in triton's interpreter where the variable TRITON_INTERPRET is 1. Without triton nothing
here is collected; default runs deselect it in any case."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Of the kernels."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert os.environ.get("TRITON_INTERPRET") == "1", "needs a GPU, or TRITON_INTERPRET=1"
    return torch.device("cpu")
