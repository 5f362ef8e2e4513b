"""Public data that is not copied into the project: in the directory that TRTMESH_TEST_DATA names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "TRTMESH_TEST_DATA"


def has_public(name: str) -> bool:
    """Whether a file is there."""
    return VARIABLE in os.environ and (Path(os.environ[VARIABLE]) / name).is_file()


def public_file(name: str) -> Path:
    """The path of a file; skips the test where it is absent."""
    if not has_public(name):
        pytest.skip(f"{VARIABLE} names no directory with {name}")
    return Path(os.environ[VARIABLE]) / name


def public_json(name: str) -> Any:
    """The content of a file; skips the test where it is absent."""
    return json.loads(public_file(name).read_text(encoding="utf-8"))
