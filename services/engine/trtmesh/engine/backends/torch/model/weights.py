"""The files of a model directory: their checks and fingerprint."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ModelUnusable
from trtmesh.chassis.model_dir import check_model_dir
from trtmesh.engine.backends.torch.model.model_types import check_type

INDEX_FILE = "model.safetensors.index.json"
LENGTH_BYTES = 8
"""Bytes at the start of a safetensors file, with the length of its header."""
MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")

WHOLE_BYTES = 64 * 2**20
"""Files up to this size are hashed whole."""
SAMPLES = 256
SAMPLE_BYTES = 64 * 1024


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
    check_type(config, _json_object(config))


def model_fingerprint(model_dir: Path, files: list[Path], dtype: str) -> str:
    """SHA-256 over config.json, generation_config.json, the type and the weights.

    Of a weight file larger than 64 MiB only the size, the header and 256 evenly spread samples of 64 KiB count, which
    tell trainings, quantisations and truncations apart without reading hundreds of gigabytes.
    """
    digest = sha256(dtype.encode())
    for name in ("config.json", "generation_config.json"):
        file = model_dir / name
        digest.update(f"\0{name}\0".encode())
        if file.is_file():
            digest.update(_canonical(file))
    for file in files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        for part in _parts(file):
            digest.update(part)
    return digest.hexdigest()


def _check_index(index: Path) -> None:
    """Raises ModelUnusable for a file of a divided model that is missing."""
    if not index.is_file():
        return
    named = _json_object(index).get("weight_map")
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
        tensors = json.loads(header)
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
    config = _json_object(model_dir / "config.json")
    layers = config.get("num_hidden_layers")
    numbers = [int(match[1]) for name in names if (match := LAYER.search(name))]
    if isinstance(layers, int) and numbers and layers > max(numbers) + 1:
        raise ModelUnusable(
            f"the weights of {model_dir} do not fit its config.json: num_hidden_layers is {layers}, but the files"
            f" have {max(numbers) + 1} layers"
        )


def _json_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{file} is refused: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnusable(f"{file} is refused: it must hold a JSON object")
    return content


def _canonical(file: Path) -> bytes:
    try:
        return json.dumps(json.loads(file.read_text(encoding="utf-8")), sort_keys=True).encode()
    except ValueError as error:
        raise ModelUnusable(f"{file} is not JSON: {error}") from error


def _parts(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            yield stream.read()
            return
        header = int.from_bytes(stream.read(8), "little")
        yield stream.read(header)
        for sample in range(SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)
