"""Tensors of the KServe protocol to and from plain values."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from trtmesh.chassis.errors import InvalidRequest

CODES: Mapping[str, str] = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
"""`struct` code of each data type but BYTES and BF16."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An output: elements row-major, BYTES decoded as UTF-8."""

    name: str
    data_type: str
    shape: tuple[int, ...]
    elements: Sequence[Any]

    def nested(self) -> Any:
        return _nested(list(self.elements), self.shape)


@dataclass(frozen=True, slots=True)
class Array:
    """An array of numbers, row-major and little-endian."""

    data_type: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def size_of(data_type: str) -> int:
        """Bytes of an element."""
        return 2 if data_type == "BF16" else struct.calcsize(f"<{CODES[data_type]}")

    def __getitem__(self, index: int) -> Self:
        """The part at an index of the first axis. Raises IndexError."""
        if not self.shape or not 0 <= index < self.shape[0]:
            raise IndexError(f"{list(self.shape)} has no part {index}")
        size = len(self.data) // self.shape[0]
        part = self.data[index * size : (index + 1) * size]
        return type(self)(self.data_type, self.shape[1:], part)

    def encoded(self, data_type: str) -> bytes:
        """The elements as another type. Raises InvalidRequest."""
        if data_type == self.data_type:
            return self.data
        return _encode(data_type, _decode(self.data_type, self.data))


def encode_rows(data_type: str, rows: Sequence[Any]) -> tuple[tuple[int, ...], bytes]:
    """Shape and data of a tensor with equally shaped rows. Raises InvalidRequest."""
    shape = (len(rows), *_shape_of(rows[0]))
    if any(_shape_of(row) != shape[1:] for row in rows):
        raise InvalidRequest("the rows of a tensor must have one shape")
    if isinstance(rows[0], Array):
        return shape, b"".join(row.encoded(data_type) for row in rows)
    return shape, _encode(data_type, [element for row in rows for element in _flat(row)])


def _encode(data_type: str, elements: Sequence[Any]) -> bytes:
    if data_type == "BYTES":
        texts = [str(element).encode() for element in elements]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if data_type == "BF16":
        # The upper half of a float.
        return b"".join(struct.pack("<f", element)[2:] for element in elements)
    if data_type not in CODES:
        raise InvalidRequest(f"this command sends no tensors of type {data_type}")
    try:
        return struct.pack(f"<{len(elements)}{CODES[data_type]}", *elements)
    except (struct.error, OverflowError) as error:
        shown = f"{str(list(elements[:8])).removesuffix(']')}{', ...' * (len(elements) > 8)}]"
        raise InvalidRequest(f"{shown} cannot be sent as {data_type}: {error}") from error


def decode_outputs(response: Any) -> list[Tensor]:
    """The outputs of a ModelInferResponse with raw contents."""
    return [
        Tensor(given.name, given.datatype, tuple(given.shape), _decode(given.datatype, data))
        for given, data in zip(response.outputs, response.raw_output_contents, strict=True)
    ]


def _decode(data_type: str, data: bytes) -> Sequence[Any]:
    if data_type == "BYTES":
        texts, position = [], 0
        while position < len(data):
            (length,) = struct.unpack_from("<I", data, position)
            position += 4 + length
            texts.append(data[position - length : position].decode(errors="replace"))
        return texts
    if data_type == "BF16":
        halves = [data[i : i + 2] for i in range(0, len(data), 2)]
        return [struct.unpack("<f", b"\0\0" + half)[0] for half in halves]
    code = CODES[data_type]
    return struct.unpack(f"<{len(data) // struct.calcsize(f'<{code}')}{code}", data)


def _shape_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, Array):
        return value.shape
    if not isinstance(value, list):
        return ()
    return (len(value), *(_shape_of(value[0]) if value else ()))


def _flat(value: Any) -> list[Any]:
    if not isinstance(value, list):
        return [value]
    return [element for part in value for element in _flat(part)]


def _nested(elements: list[Any], shape: Sequence[int]) -> Any:
    if len(shape) <= 1:
        return elements
    size = math.prod(shape[1:])
    return [
        _nested(elements[index * size : (index + 1) * size], shape[1:]) for index in range(shape[0])
    ]
