"""Public data that is not copied into the project: in the directory that TRTMESH_TEST_DATA names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TRTMESH_TEST_DATA"


def public_json(name: str) -> Any:
    """The content of a file; skips the test where it is absent."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no directory with {name}")
    file = Path(os.environ[VARIABLE]) / name
    if not file.is_file():
        pytest.skip(f"no {file}")
    return json.loads(file.read_text(encoding="utf-8"))
