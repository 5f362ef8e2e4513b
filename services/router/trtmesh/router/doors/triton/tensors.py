"""Tensors of the KServe protocol: declarations, inputs by rows, outputs as bytes."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.frozen import frozen
from trtmesh.router.doors.triton.releases import History
from trtmesh.v1 import generation_pb2 as pb

Shape = tuple[int, ...]
Elements: TypeAlias = "array[Any] | Sequence[bytes]"
"""Elements of a tensor, row-major; of BYTES as separate strings."""
Contents: TypeAlias = "bytes | memoryview | array[Any] | list[bytes]"
"""Raw contents of a tensor, or the elements. Raw contents may be a part of the body: to copy the largest takes 50
ms."""

ELEMENT_CODES = {
    "BOOL": "b",
    "UINT8": "B",
    "INT32": "i",
    "UINT32": "I",
    "INT64": "q",
    "UINT64": "Q",
    "FP32": "f",
    # Python has no arrays of these: they pass through, two bytes an element.
    "FP16": "H",
    "BF16": "H",
}
"""`array` code of each data type but BYTES."""

MOST_TEXTS = 2**16
"""Most elements of a tensor of BYTES."""

MESH_DATA_TYPES = {
    "FP32": pb.DATA_TYPE_FP32,
    "FP16": pb.DATA_TYPE_FP16,
    "BF16": pb.DATA_TYPE_BF16,
    "INT32": pb.DATA_TYPE_INT32,
    "INT64": pb.DATA_TYPE_INT64,
    "UINT8": pb.DATA_TYPE_UINT8,
    "BOOL": pb.DATA_TYPE_BOOL,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a template: its declarations by release, `dims` without the batch dimension, -1 for any extent.

    A tensor is accepted in the data types and dims of all releases.
    """

    name: str
    history: History
    source: str = ""
    """Markdown of the contract's table: the message fields, or why there are none."""
    note: str = ""
    """Markdown of the contract's table."""
    data_types: tuple[str, ...] = field(init=False)
    dims: Shape = field(init=False)
    former_dims: tuple[Shape, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "data_types", self.history.data_types)
        object.__setattr__(self, "dims", self.history.newest.dims)
        object.__setattr__(self, "former_dims", self.history.former_dims)

    @property
    def data_type(self) -> str:
        return self.data_types[0]


@frozen
class InputTensor:
    """An input: `shape` includes the batch dimension."""

    name: str
    data_type: str
    shape: Shape
    elements: Elements

    @property
    def row_shape(self) -> Shape:
        return self.shape[1:]

    @property
    def row_length(self) -> int:
        return math.prod(self.shape[1:])

    def row(self, index: int) -> Any:
        size = self.row_length
        return self.elements[index * size : (index + 1) * size]

    def scalar(self, row: int) -> Any:
        """The value of a row of shape [1]."""
        value = self.elements[row]
        return bool(value) if self.data_type == "BOOL" else value

    def texts(self, row: int) -> list[str]:
        """The texts of a row of BYTES. Raises InvalidRequest."""
        try:
            return [element.decode() for element in self.row(row)]
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"is not valid UTF-8: {error}", field=self.name) from error

    def tensor(self, row: int) -> pb.Tensor:
        """A row as a dense array of the mesh."""
        return pb.Tensor(
            data_type=MESH_DATA_TYPES[self.data_type],
            shape=self.row_shape,
            data=self.row(row).tobytes(),
        )


class Output(NamedTuple):
    """One output tensor: KServe data type, shape, elements row-major and little-endian."""

    name: str
    data_type: str
    shape: Shape
    data: bytes

    @classmethod
    def of_texts(cls, name: str, texts: Sequence[str]) -> Output:
        """A list of texts."""
        return cls(name, "BYTES", (len(texts),), text_data(texts))

    @classmethod
    def of_numbers(
        cls, name: str, data_type: str, shape: Shape, numbers: Sequence[float]
    ) -> Output:
        return cls(name, data_type, shape, array(ELEMENT_CODES[data_type], numbers).tobytes())

    @classmethod
    def of_input(cls, name: str, given: InputTensor) -> Output:
        """An input that passes through; not of BYTES."""
        assert isinstance(given.elements, array)
        return cls(name, given.data_type, given.shape, given.elements.tobytes())

    @classmethod
    def of_rows(cls, name: str, data_type: str, numbers: Sequence[float]) -> Output:
        """One number a row."""
        return cls.of_numbers(name, data_type, (len(numbers), 1), numbers)


def pad_rows(rows: Sequence[Sequence[float]], pads: Iterable[float]) -> tuple[int, list[float]]:
    """Returns the longest length, and all rows padded to this length, each row with a padding of the row."""
    longest = max(map(len, rows))
    elements: list[float] = []
    for row, pad in zip(rows, pads, strict=False):
        elements += row
        elements += [pad] * (longest - len(row))
    return longest, elements


def split_elements(data: bytes | memoryview) -> list[bytes]:
    """Elements of a BYTES tensor, each preceded by four bytes of length. Raises ValueError for incomplete data or too
    many elements."""
    elements: list[bytes] = []
    position = 0
    while position + 4 <= len(data):
        if len(elements) == MOST_TEXTS:
            raise ValueError(f"more than {MOST_TEXTS} string elements")
        length = int.from_bytes(data[position : position + 4], "little")
        position += 4 + length
        elements.append(bytes(data[position - length : position]))
    if position != len(data):
        raise ValueError("incomplete string length indicator or data")
    return elements


def text_data(texts: Sequence[str]) -> bytes:
    """Elements of a BYTES tensor."""
    if len(texts) == 1:
        # As in each response of a stream.
        data = texts[0].encode()
        return len(data).to_bytes(4, "little") + data
    return b"".join([len(data).to_bytes(4, "little") + data for data in map(str.encode, texts)])
