"""The model types of transformers, read from its source: the import takes seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ModelUnusable

PAIR = re.compile(r'(?:[({]|^\s+)"([^"\s]+)"[,:] "\w+Config"', re.MULTILINE)
"""A type and its class of configurations."""


def check_type(file: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelUnusable for a type unknown to transformers, whose own error advises to run foreign code."""
    kind = config.get("model_type")
    if kind is None or kind in known_types():
        return
    reason = f"model type {kind} is unknown to transformers {version('transformers')}"
    if config.get("auto_map"):
        reason += "; the directory has code for it (auto_map), and code of a model is never run"
    raise ModelUnusable(f"{file} is refused: {reason}")


@cache
def known_types() -> frozenset[str]:
    found = find_spec("transformers")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'transformers'")
    source = Path(found.origin).parent / "models" / "auto"
    files = (source / "auto_mappings.py", source / "configuration_auto.py")
    return frozenset(
        name for file in files for name in PAIR.findall(file.read_text(encoding="utf-8"))
    )
