"""Reads the tensors of a safetensors file from bytes, without a path: they share one copy of them.

The library copies tensor by tensor with the GIL held, which would hold up the tokens of running sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from trtmesh.chassis.safetensors_header import Entry

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


def read_tensors(data: bytes, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
    """The tensors of a file whose header has `entries`."""
    start = min((entry.begin for entry in entries.values()), default=len(data))
    values = data_of(data, start)
    return {key: _tensor(values[e.begin - start : e.end - start], e) for key, e in entries.items()}


def data_of(data: bytes, start: int) -> Tensor:
    """A writable copy of the bytes from `start` on, made without the GIL."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).copy())


def _tensor(values: Tensor, entry: Entry) -> Tensor:
    dtype = _DTYPES[entry.dtype]
    # The views of the library start at multiples of 8 bytes; an older writer's may not.
    aligned = values if values.storage_offset() % dtype.itemsize == 0 else values.clone()
    return aligned.view(dtype).view(entry.shape)
