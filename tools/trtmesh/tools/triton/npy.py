"""Reads the arrays of .npy files: without numpy, and never by pickle."""

from __future__ import annotations

import ast
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.triton.tensors import Array

MAGIC = b"\x93NUMPY"
MAX_FILE_BYTES = 2**30
MAX_HEADER_BYTES = 65536
HEADER_LENGTHS: Mapping[int, str] = {1: "<H", 2: "<I", 3: "<I"}
"""`struct` format of the header's length, by version of the format."""

DATA_TYPES: Mapping[str, str] = {
    "|b1": "BOOL",
    "|u1": "UINT8",
    "<u2": "UINT16",
    "<u4": "UINT32",
    "<u8": "UINT64",
    "|i1": "INT8",
    "<i2": "INT16",
    "<i4": "INT32",
    "<i8": "INT64",
    "<f2": "FP16",
    "<f4": "FP32",
    "<f8": "FP64",
    # numpy has no type for it; upstream's tools write two opaque bytes.
    "|V2": "BF16",
}


def read_npy(file: Path) -> Array:
    """Raises InvalidRequest."""
    try:
        with file.open("rb") as stream:
            return _read(stream, file.stat().st_size)
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, struct.error) as error:
        raise InvalidRequest(f"{file} is not a usable .npy file: {error}") from error


def _read(stream: BinaryIO, size: int) -> Array:
    if size > MAX_FILE_BYTES:
        raise ValueError(f"it has {size} bytes, but at most {MAX_FILE_BYTES} are read")
    data_type, shape = _header(stream)
    data = stream.read()
    expected = math.prod(shape) * Array.size_of(data_type)
    if len(data) != expected:
        raise ValueError(f"{list(shape)} of {data_type} is {expected} bytes, not {len(data)}")
    return Array(data_type, shape, data)


def _header(stream: BinaryIO) -> tuple[str, tuple[int, ...]]:
    """Data type and shape."""
    if stream.read(len(MAGIC)) != MAGIC:
        raise ValueError("it does not begin as one")
    version, _ = stream.read(2)
    if version not in HEADER_LENGTHS:
        raise ValueError(f"version {version} of the format is unknown")
    length_format = HEADER_LENGTHS[version]
    (length,) = struct.unpack(length_format, stream.read(struct.calcsize(length_format)))
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"its header has {length} bytes, but at most {MAX_HEADER_BYTES} are read")
    try:
        header = ast.literal_eval(stream.read(length).decode("latin-1").strip())
        described, in_columns, shape = (header[k] for k in ("descr", "fortran_order", "shape"))
    except (SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise ValueError("its header is malformed") from error
    if not isinstance(described, str) or described not in DATA_TYPES:
        raise ValueError(f"its type is {described!r} but must be one of {', '.join(DATA_TYPES)}")
    if in_columns:
        raise ValueError("it is in column order; save numpy.ascontiguousarray of the array")
    if not (isinstance(shape, tuple) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise ValueError(f"its shape is {shape!r}")
    return DATA_TYPES[described], shape
