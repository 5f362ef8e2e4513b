"""Checks the files of a model directory, and the model type without importing transformers, which takes seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.json_text import load_json
from trtmesh.chassis.model_dir import check_model_dir, read_object
from trtmesh.engine.model_fingerprint import LENGTH_BYTES, MAX_HEADER_BYTES

PAIR = re.compile(r'(?:[({]|^\s+)"([^"\s]+)"[,:] "\w+Config"', re.MULTILINE)
"""A type and its class of configurations."""


def check_type(file: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelUnusable for a type unknown to transformers. The library's own error advises to run foreign code."""
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


INDEX_FILE = "model.safetensors.index.json"
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files, checked without reading weights. Raises ModelUnusable for an unsuitable directory."""
    check_model_dir(model_dir)
    check_config(model_dir)
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in model_dir.glob("pytorch_model*.bin"))
        hint = f", but {pickles[0]}: run trtmesh convert {model_dir}" if pickles else ""
        raise ModelUnusable(f"model directory {model_dir} has no *.safetensors files{hint}")
    _check_index(model_dir / INDEX_FILE)
    names = [name for file in files for name in _tensor_names(file)]
    _check_layers(model_dir, names)
    return files


def check_config(model_dir: Path) -> None:
    """Raises ModelUnusable unless config.json names a type known to transformers, or none."""
    config = model_dir / "config.json"
    if not config.is_file():
        raise ModelUnusable(f"model directory {model_dir} has no config.json")
    check_type(config, read_object(config))


def _check_index(index: Path) -> None:
    """Raises ModelUnusable for a missing file of a divided model."""
    if not index.is_file():
        return
    named = read_object(index).get("weight_map")
    for name in sorted(set(named.values())) if isinstance(named, dict) else ():
        if not (index.parent / name).is_file():
            raise ModelUnusable(f"{index} names {name}, which is missing; download it too")


def _tensor_names(file: Path) -> list[str]:
    """The tensors of the header. Raises ModelUnusable unless the file has all their bytes and no more."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        header = stream.read(length) if length <= min(size, MAX_HEADER_BYTES) else b""
    try:
        tensors = load_json(header)
        tensors.pop("__metadata__", None)
        ends = [int(tensor["data_offsets"][1]) for tensor in tensors.values()]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelUnusable(f"{file} is not a readable safetensors file: no header") from error
    expected = LENGTH_BYTES + length + max(ends, default=0)
    if size != expected:
        raise ModelUnusable(
            f"{file} is not a readable safetensors file: it has {size} bytes of {expected}; copy or download it again"
        )
    return [*tensors]


def _check_layers(model_dir: Path, names: list[str]) -> None:
    """Raises ModelUnusable where config.json has more layers than the weights."""
    config = read_object(model_dir / "config.json")
    layers = config.get("num_hidden_layers")
    numbers = [int(match[1]) for name in names if (match := LAYER.search(name))]
    if isinstance(layers, int) and numbers and layers > max(numbers) + 1:
        raise ModelUnusable(
            f"the weights of {model_dir} do not fit its config.json: num_hidden_layers is {layers}, but the files"
            f" have {max(numbers) + 1} layers"
        )
