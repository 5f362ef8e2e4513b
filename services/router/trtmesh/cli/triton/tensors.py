"""Tensors of the KServe protocol to and from plain values."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest

CODES: Mapping[str, str] = {
    "BOOL": "?",
    "UINT8": "B",
    "INT32": "i",
    "INT64": "q",
    "UINT64": "Q",
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
        """The elements as nested lists."""
        return _nested(list(self.elements), self.shape)


def encode_rows(data_type: str, rows: Sequence[Any]) -> tuple[tuple[int, ...], bytes]:
    """Shape and data of a tensor with equally shaped rows. Raises InvalidRequest."""
    shape = (len(rows), *_shape_of(rows[0]))
    if any(_shape_of(row) != shape[1:] for row in rows):
        raise InvalidRequest("the rows of a tensor must have one shape")
    elements = [element for row in rows for element in _flat(row)]
    if data_type == "BYTES":
        texts = [str(element).encode() for element in elements]
        return shape, b"".join(struct.pack("<I", len(text)) + text for text in texts)
    if data_type == "BF16":
        # The upper half of a float.
        return shape, b"".join(struct.pack("<f", element)[2:] for element in elements)
    if data_type not in CODES:
        raise InvalidRequest(f"this command sends no tensors of type {data_type}")
    try:
        return shape, struct.pack(f"<{len(elements)}{CODES[data_type]}", *elements)
    except (struct.error, OverflowError) as error:
        raise InvalidRequest(f"{elements} cannot be sent as {data_type}: {error}") from error


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
