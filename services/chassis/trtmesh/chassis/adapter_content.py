"""The content of a LoRA adapter: two files as bytes, and their digest, the adapter's version.

| format | configuration | weights |
|---|---|---|
| PEFT | adapter_config.json | adapter_model.safetensors |
| arrays | model.lora_config.npy | model.lora_weights.npy |
"""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

from trtmesh.chassis.errors import InvalidField, InvalidRequest, NotFound, UnsupportedField
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.v1 import generation_pb2 as pb

MAX_ADAPTER_BYTES = 2**30
"""Most bytes of a content, in routers and workers: rank 32 on all layers of a model of 70B takes 0.8 GiB."""
DIGEST_BYTES = 16
MOST_HEADER_BYTES = 4096
MOST_MODULES = 1 << 16
MOST_CONFIG_BYTES = 1 << 21
"""Largest configuration: room for MOST_MODULES rows of four int32 and their header."""

UPLOAD_ACCEPTED = ("trtmesh-upload", "accepted")
"""Initial metadata of an upload accepted by the router: gRPC misses a refusal while sending content."""


class FileNames(NamedTuple):
    """The files of an adapter's directory."""

    config: str
    weights: str


FILE_NAMES: Mapping[int, FileNames] = {
    pb.ADAPTER_FORMAT_PEFT: FileNames("adapter_config.json", "adapter_model.safetensors"),
    pb.ADAPTER_FORMAT_ARRAYS: FileNames("model.lora_config.npy", "model.lora_weights.npy"),
}
"""Files by format."""

_NPY_TYPES: dict[int, str] = {
    pb.DATA_TYPE_FP32: "<f4",
    pb.DATA_TYPE_FP16: "<f2",
    # numpy has no bfloat16; TensorRT-LLM's files hold the bits as V2 too.
    pb.DATA_TYPE_BF16: "|V2",
    pb.DATA_TYPE_INT32: "<i4",
}

_NPY_SIZES = {"<f4": 4, "<f2": 2, "|V2": 2}
"""Bytes of a weight by the type in a file."""

_NPY_LENGTHS = {b"\x93NUMPY\x01\x00": "<H", b"\x93NUMPY\x02\x00": "<I"}
"""Type of the header's length by the first bytes of a file."""


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """The files of an adapter; `format` is a generation_pb2.AdapterFormat."""

    format: int
    config: bytes
    weights: bytes

    @classmethod
    def of_arrays(cls, weights: Tensor, config: Tensor) -> Self:
        """Returns the content of an adapter from a request's tensors of FP32, FP16, BF16 and INT32.

        Raises InvalidField for another type, or for too large a configuration.
        """
        if len(file := _npy(config)) > MOST_CONFIG_BYTES:
            limit = f"at most {MOST_CONFIG_BYTES}"
            raise InvalidField.of("lora.config", f"{len(file)} bytes", limit)
        return cls(pb.ADAPTER_FORMAT_ARRAYS, file, _npy(weights))

    @classmethod
    def read(cls, directory: Path, most_bytes: int) -> Self:
        """Reads an adapter's directory. Raises NotFound; InvalidRequest for more than `most_bytes` or two formats."""
        kind = format_of(directory)
        files = [directory / name for name in FILE_NAMES[kind]]
        return cls(kind, *_read(directory, files, most_bytes))

    @property
    def size_bytes(self) -> int:
        return len(self.config) + len(self.weights)

    @property
    def header(self) -> bytes:
        """Format and sizes as text: the first bytes covered by the digest."""
        return f"{self.format} {len(self.config)} {len(self.weights)} ".encode()

    @property
    def version(self) -> str:
        """The digest of format, sizes and both files, as 32 hexadecimal digits."""
        digest = blake2b(self.header, digest_size=DIGEST_BYTES)
        digest.update(self.config)
        digest.update(self.weights)
        return digest.hexdigest()


def format_of(directory: Path) -> int:
    """The format of an adapter's directory. Raises NotFound without all files of a format, InvalidRequest with two."""
    if not directory.is_dir():
        raise NotFound(f"there is no directory {directory}")
    present = {
        kind: [name for name in names if (directory / name).is_file()]
        for kind, names in FILE_NAMES.items()
    }
    found = [kind for kind, names in present.items() if names]
    if len(found) > 1:
        names = ", ".join(name for kind in found for name in present[kind])
        raise InvalidRequest(f"{directory} holds adapters in two formats: {names}")
    for kind in found:
        if missing := set(FILE_NAMES[kind]) - set(present[kind]):
            raise NotFound(f"{directory} has {present[kind][0]} but no {missing.pop()}")
        return kind
    known = " or ".join(" and ".join(names) for names in FILE_NAMES.values())
    raise NotFound(f"{directory} is not an adapter: it lacks {known}")


def _read(directory: Path, files: list[Path], most_bytes: int) -> list[bytes]:
    try:
        sizes = [file.stat().st_size for file in files]
        _check_size(f"{files[0]} has", sizes[0], MOST_CONFIG_BYTES)
        _check_size(f"{directory} holds an adapter of", sum(sizes), most_bytes)
        return [file.read_bytes() for file in files]
    except OSError as error:
        raise NotFound(f"{directory} cannot be read: {error.strerror}") from error


def _check_size(subject: str, size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise InvalidRequest(
            f"{subject} {size} bytes, more than {most_bytes}",
            value=str(size),
            limit=f"at most {most_bytes} bytes",
        )


_UNREADABLE = (
    *(ValueError, KeyError, TypeError, AttributeError, SyntaxError, RecursionError, MemoryError),
    struct.error,
)
"""Errors of parsing."""


def rank_of(content: AdapterContent) -> int:
    """Returns the largest rank in the configuration, not yet compared with the weights. Raises InvalidRequest."""
    reader = _peft_rank if content.format == pb.ADAPTER_FORMAT_PEFT else _array_rank
    try:
        return reader(content.config)
    except _UNREADABLE as error:
        raise InvalidRequest(
            f"names no rank: {type(error).__name__} {error}"[:200], field="adapter.config"
        ) from error


def _peft_rank(config: bytes) -> int:
    if len(config) > MOST_CONFIG_BYTES:
        raise ValueError(f"{len(config)} bytes, more than {MOST_CONFIG_BYTES}")
    values = json.loads(config)
    ranks = [values["r"], *(values.get("rank_pattern") or {}).values()]
    if not all(type(rank) is int and 0 <= rank < 2**31 for rank in ranks):
        raise ValueError(f"the ranks are {ranks}")
    return int(max(ranks))


def _array_rank(config: bytes) -> int:
    """The largest number in the third column."""
    ranks = _array_columns(config)[2]
    if min(ranks) < 0:
        raise ValueError(f"rank {min(ranks)}")
    return int(max(ranks))


def _array_columns(config: bytes) -> list[tuple[int, ...]]:
    """The columns of an array of int32, [modules, 3 or 4] or [1, modules, 3 or 4]."""
    header, start = _npy_header(config)
    *leading, rows, columns = header["shape"]
    if header["descr"] != "<i4" or columns not in (3, 4) or leading not in ([], [1]):
        raise ValueError(f"the array is {header}")
    if not 0 < rows <= MOST_MODULES:
        raise ValueError(f"{rows} modules, not 1 to {MOST_MODULES}")
    values = struct.unpack_from(f"<{rows * columns}i", config, start)
    by_column = header["fortran_order"]
    return [
        values[n * rows : (n + 1) * rows] if by_column else values[n::columns]
        for n in range(columns)
    ]


def check_arrays(content: AdapterContent, where: str = "") -> None:
    """Raises InvalidRequest or UnsupportedField unless both arrays are whole and describe as many plain LoRA updates;
    `where` precedes the names of files. No weight is read."""
    names = FILE_NAMES[pb.ADAPTER_FORMAT_ARRAYS]
    name = names.config
    try:
        _array_rank(content.config)
        columns = _array_columns(content.config)
        name = names.weights
        header, start = _npy_header(content.weights)
        *leading, rows, width = header["shape"]
        if header["descr"] not in _NPY_SIZES or leading not in ([], [1]):
            raise ValueError(f"the array is {header}")
        if rows != len(columns[0]):
            raise ValueError(f"{rows} rows, but {names.config} has {len(columns[0])}")
        if (size := rows * width * _NPY_SIZES[header["descr"]]) != len(content.weights) - start:
            raise ValueError(f"{len(content.weights) - start} bytes of values, not {size}")
    except _UNREADABLE as error:
        problem = f"is not a readable array of an adapter: {error}"
        raise InvalidRequest(problem, field=where + name) from error
    if any(any(column) for column in columns[3:]):
        raise UnsupportedField(
            "has DoRA updates; only plain LoRA is served", field=where + names.config
        )


def _npy_header(data: bytes) -> tuple[Any, int]:
    """The header of a .npy file, and where the values begin."""
    size = _NPY_LENGTHS[data[:8]]
    (length,) = struct.unpack_from(size, data, 8)
    if length > MOST_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    start = 8 + struct.calcsize(size)
    end = start + length
    return ast.literal_eval(data[start:end].decode("latin-1").strip()), end


def is_number(text: str) -> bool:
    """Returns whether a reference to an adapter is a number. Names contain other characters."""
    return text.isascii() and text.isdecimal()


def number_of(name: str) -> int:
    """Returns the number of an adapter registered without a number: equal in all routers, above the numbers of
    clients."""
    digest = blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1 << 62


def _npy(tensor: Tensor) -> bytes:
    """Returns a tensor as a .npy file of version 1.0, with a header padded to 64 bytes. Raises InvalidField."""
    if (kind := _NPY_TYPES.get(tensor.data_type)) is None:
        given = pb.DataType.Name(pb.DataType.ValueType(tensor.data_type))
        raise InvalidField.of("lora data_type", given, "FP32, FP16, BF16 or INT32")
    shape = tuple(tensor.shape)
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    length = -(-(10 + len(header) + 1) // 64) * 64 - 10
    start = b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little")
    return start + header.ljust(length - 1).encode() + b"\n" + tensor.data
