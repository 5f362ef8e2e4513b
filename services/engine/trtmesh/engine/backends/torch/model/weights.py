"""The files of a model directory: their checks and fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from trtmesh.chassis.errors import ModelUnusable

WHOLE_BYTES = 64 * 2**20
"""Files up to this size are hashed whole."""
SAMPLES = 256
SAMPLE_BYTES = 64 * 1024


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files. Raises ModelUnusable for an unsuitable directory."""
    if not model_dir.is_dir():
        raise ModelUnusable(f"model directory {model_dir} does not exist")
    if not (model_dir / "config.json").is_file():
        raise ModelUnusable(f"model directory {model_dir} has no config.json")
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        pickles = sorted(path.name for path in model_dir.glob("pytorch_model*.bin"))
        hint = f", but {pickles[0]}: run trtmesh convert {model_dir}" if pickles else ""
        raise ModelUnusable(f"model directory {model_dir} has no *.safetensors files{hint}")
    for file in files:
        _check(file)
    return files


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


def _check(file: Path) -> None:
    """Names a torn file, before a loader fails deep inside."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as content:
            content.keys()
    except (SafetensorError, OSError) as error:
        raise ModelUnusable(f"{file} is not a readable safetensors file: {error}") from error


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
