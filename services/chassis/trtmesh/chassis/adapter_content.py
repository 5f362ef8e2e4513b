"""The content of a LoRA adapter: two files as bytes, and the digest that is its version everywhere.

| format | configuration | weights |
|---|---|---|
| PEFT | adapter_config.json | adapter_model.safetensors |
| arrays | model.lora_config.npy | model.lora_weights.npy |
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Self

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.v1 import generation_pb2 as pb

DIGEST_BYTES = 16

_NPY_TYPES: dict[int, str] = {
    pb.DATA_TYPE_FP32: "<f4",
    pb.DATA_TYPE_FP16: "<f2",
    # numpy has no bfloat16; TensorRT-LLM's files hold its bits as V2 too.
    pb.DATA_TYPE_BF16: "|V2",
    pb.DATA_TYPE_INT32: "<i4",
}


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The files of an adapter; `format` is a generation_pb2.AdapterFormat."""

    format: int
    config: bytes
    weights: bytes

    @classmethod
    def of_arrays(cls, weights: Tensor, config: Tensor) -> Self:
        """The content of an adapter that a request brought as tensors of FP32, FP16, BF16 and INT32.

        Raises InvalidField for another type.
        """
        return cls(pb.ADAPTER_FORMAT_ARRAYS, _npy(config), _npy(weights))

    @property
    def size_bytes(self) -> int:
        return len(self.config) + len(self.weights)

    @property
    def version(self) -> str:
        """The digest of format, sizes and both files, as 32 hexadecimal digits."""
        digest = blake2b(digest_size=DIGEST_BYTES)
        digest.update(f"{self.format} {len(self.config)} {len(self.weights)} ".encode())
        digest.update(self.config)
        digest.update(self.weights)
        return digest.hexdigest()


def number_of(name: str) -> int:
    """The number of an adapter registered without one: equal in all routers, above those that clients choose."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 62


def _npy(tensor: Tensor) -> bytes:
    """A tensor as a .npy file of version 1.0, whose header ends at a multiple of 64 bytes. Raises InvalidField."""
    if (kind := _NPY_TYPES.get(tensor.data_type)) is None:
        given = pb.DataType.Name(pb.DataType.ValueType(tensor.data_type))
        raise InvalidField.of("lora data_type", given, "FP32, FP16, BF16 or INT32")
    shape = tuple(tensor.shape)
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    length = -(-(10 + len(header) + 1) // 64) * 64 - 10
    start = b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little")
    return start + header.ljust(length - 1).encode() + b"\n" + tensor.data
