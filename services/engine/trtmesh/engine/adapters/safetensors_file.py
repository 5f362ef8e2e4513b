"""Reads a safetensors file from bytes, without a path: its tensors share one copy of them.

The library copies tensor by tensor with the GIL held, which would hold up the tokens of running sequences.
"""

from __future__ import annotations

import json
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from trtmesh.chassis.errors import InvalidRequest

MOST_HEADER_BYTES = 100 * 10**6
"""Largest header, as in the library."""
MOST_DIMENSIONS = 8
_LENGTH_BYTES = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_safetensors(data: bytes, name: str) -> dict[str, Tensor]:
    """The tensors of a file. Raises InvalidRequest with `name` for anything but a whole and valid file."""
    try:
        header, start = _header(data)
        values = data_of(data, start)
        tensors, end = {}, 0
        for key, entry in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
            first, last = entry["data_offsets"]
            if first != end:
                raise ValueError(f"{key} begins at {first}, not at {end}")
            tensors[key] = _tensor(values[first:last], entry)
            end = last
        if end != len(values):
            raise ValueError(f"has {len(values)} bytes of values, but its header describes {end}")
    except Exception as error:
        # Broad on purpose: a broken file fails in many types.
        raise InvalidRequest(f"is not a readable safetensors file: {error}", field=name) from error
    return tensors


def data_of(data: bytes, start: int) -> Tensor:
    """A writable copy of the bytes from `start` on, made without the GIL."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).copy())


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Entries by key, and the position of the first value."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if not 0 < length <= MOST_HEADER_BYTES or end > len(data):
        raise ValueError(f"its header of {length} bytes is cut off or too long")
    header = json.loads(data[_LENGTH_BYTES:end])
    header.pop("__metadata__", None)
    return header, end


def _tensor(values: Tensor, entry: dict[str, Any]) -> Tensor:
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}"[:200])
    if prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{entry['dtype']} {shape} takes other than {len(values)} bytes")
    # The views of the library start at multiples of 8 bytes; an older writer's may not.
    aligned = values if values.storage_offset() % dtype.itemsize == 0 else values.clone()
    return aligned.view(dtype).view(shape)
