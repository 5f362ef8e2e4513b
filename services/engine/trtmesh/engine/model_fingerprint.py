"""The fingerprint of a model, of its configuration and weights."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

from trtmesh.chassis.model_dir import read_object

LENGTH_BYTES = 8
"""Bytes at the start of a safetensors file, with the length of the header."""
MAX_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
WHOLE_BYTES = 64 * 2**20
"""Files up to this size are hashed whole."""
SAMPLES = 256
SAMPLE_BYTES = 64 * 1024


def model_fingerprint(model_dir: Path, files: Sequence[Path], dtype: str) -> str:
    """SHA-256 over config.json, generation_config.json, the type and the weights.

    Of a weight file larger than 64 MiB only the size, the header and 256 evenly spread samples of 64 KiB count: enough
    to tell trainings, quantisations and truncations apart without reading hundreds of gigabytes.
    """
    digest = sha256(dtype.encode())
    for name in ("config.json", "generation_config.json"):
        file = model_dir / name
        digest.update(f"\0{name}\0".encode())
        if file.is_file():
            digest.update(json.dumps(read_object(file), sort_keys=True).encode())
    for file in files:
        digest.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        for part in _parts(file):
            digest.update(part)
    return digest.hexdigest()


def _parts(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            yield stream.read()
            return
        header = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        yield stream.read(min(header, MAX_HEADER_BYTES))
        for sample in range(SAMPLES):
            stream.seek((size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
            yield stream.read(SAMPLE_BYTES)
