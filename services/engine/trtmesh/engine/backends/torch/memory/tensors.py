"""Tensors of messages, as tensors of PyTorch and back."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from trtmesh.chassis import vocabulary
from trtmesh.v1 import generation_pb2 as pb

FLOATS = {
    pb.DATA_TYPE_FP32: torch.float32,
    pb.DATA_TYPE_FP16: torch.float16,
    pb.DATA_TYPE_BF16: torch.bfloat16,
}
DATA_TYPES = {dtype: data_type for data_type, dtype in FLOATS.items()}
DTYPES = {**FLOATS, pb.DATA_TYPE_INT32: torch.int32}


def from_message(tensor: vocabulary.Tensor) -> Tensor:
    """A copy of a tensor of any of DTYPES."""
    # PyTorch warns of read-only memory; numpy copies without the GIL.
    data = np.frombuffer(tensor.data, dtype=np.uint8).copy()
    dtype = DTYPES[pb.DataType.ValueType(tensor.data_type)]
    return torch.from_numpy(data).view(dtype).view(tensor.shape)


def to_message(rows: Tensor, data_type: int) -> vocabulary.Tensor:
    """A tensor in the requested element type, FP32 where none is requested."""
    data_type = data_type or pb.DATA_TYPE_FP32
    values = rows.to(FLOATS[pb.DataType.ValueType(data_type)]).cpu().contiguous()
    data = values.view(torch.uint8).numpy().tobytes()
    return vocabulary.Tensor(data_type, tuple(values.shape), data)
