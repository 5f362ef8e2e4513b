"""Public data that is not copied into the project: in TRTMESH_TEST_DATA, else in ../shared/data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

DIRECTORY = Path(os.environ.get("TRTMESH_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def public_json(name: str) -> Any:
    """The content of a file; skips the test where it is absent."""
    file = DIRECTORY / name
    if not file.is_file():
        pytest.skip(f"no {file}; TRTMESH_TEST_DATA names the directory with {name}")
    return json.loads(file.read_text(encoding="utf-8"))
