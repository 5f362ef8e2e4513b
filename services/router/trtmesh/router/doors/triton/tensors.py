"""Tensors of the KServe protocol as they arrive: checked against their declaration, cut into rows."""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.v1 import generation_pb2 as pb

ELEMENT_CODES = {
    "BOOL": "b",
    "UINT8": "B",
    "INT32": "i",
    "INT64": "q",
    "UINT64": "Q",
    "FP32": "f",
    # What Python has no array of is only ever passed on, two bytes an element.
    "FP16": "H",
    "BF16": "H",
}
"""`array` code of each data type but BYTES."""

CONTENTS_FIELDS = {
    "BOOL": "bool_contents",
    "UINT8": "uint_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "BYTES": "bytes_contents",
}
"""Where typed contents stand; the 16-bit types have none and come raw only."""

MESH_DATA_TYPES = {
    "FP32": pb.DATA_TYPE_FP32,
    "FP16": pb.DATA_TYPE_FP16,
    "BF16": pb.DATA_TYPE_BF16,
    "INT32": pb.DATA_TYPE_INT32,
    "INT64": pb.DATA_TYPE_INT64,
    "UINT8": pb.DATA_TYPE_UINT8,
    "BOOL": pb.DATA_TYPE_BOOL,
}

BATCH_DIMENSION_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try"
    " setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)
"""Triton's own words, which clients know."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as a model declares it. `dims` are without the batch dimension; -1 is any extent.

    A tensor of several `data_types` is declared with the first and taken in any.
    """

    name: str
    data_types: tuple[str, ...]
    dims: tuple[int, ...]
    optional: bool = True
    scalar: bool = False
    """Whether the model sees [batch] where the client sends [batch, 1]."""
    ragged: bool = False

    @property
    def data_type(self) -> str:
        return self.data_types[0]


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input: `shape` with the batch dimension, elements row-major; BYTES elements one by one."""

    name: str
    data_type: str
    shape: tuple[int, ...]
    elements: array[Any] | Sequence[bytes]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    def row(self, index: int) -> Any:
        """The elements of one row of the batch."""
        size = math.prod(self.row_shape)
        return self.elements[index * size : (index + 1) * size]

    def scalar(self, row: int) -> Any:
        """The one value of a row of shape [1]."""
        value = self.elements[row]
        return bool(value) if self.data_type == "BOOL" else value

    def texts(self, row: int) -> list[str]:
        """The texts of a row of BYTES."""
        try:
            return [element.decode() for element in self.row(row)]
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"input '{self.name}' holds text that is no UTF-8: {error}"
            ) from error

    def tensor(self, row: int) -> pb.Tensor:
        """A row as the mesh takes dense arrays."""
        return pb.Tensor(
            data_type=MESH_DATA_TYPES[self.data_type],
            shape=self.row_shape,
            data=self.row(row).tobytes(),
        )


def read_inputs(
    request: Any, specs: dict[str, TensorSpec], max_batch_size: int
) -> tuple[dict[str, InputTensor], int]:
    """The inputs of a ModelInferRequest by name, and the batch size. A `max_batch_size` of 0 means that shapes have no
    batch dimension. Raises InvalidRequest in Triton's words."""
    model = request.model_name
    raw = iter(request.raw_input_contents) if request.raw_input_contents else None
    tensors: dict[str, InputTensor] = {}
    batch_size = 0
    for given in request.inputs:
        spec = specs.get(given.name)
        if spec is None:
            raise InvalidRequest(f"unexpected inference input '{given.name}' for model '{model}'")
        if given.name in tensors:
            raise InvalidRequest(f"input '{given.name}' already exists in request")
        _check(given, spec, model, batched=max_batch_size > 0)
        # Without a batch dimension a request is one row.
        shape = tuple(given.shape) if max_batch_size else (1, *given.shape)
        batch_size = batch_size or shape[0]
        if shape[0] != batch_size:
            raise InvalidRequest(
                f"input '{given.name}' batch size does not match other inputs for '{model}'"
            )
        elements = _elements(given, raw, model)
        tensors[given.name] = InputTensor(given.name, given.datatype, shape, elements)
    left_over = len(list(raw or ()))
    if left_over:
        raise InvalidRequest(
            f"raw_input_contents has {left_over} more entries than model '{model}' got inputs"
        )
    if batch_size > max_batch_size > 0:
        raise InvalidRequest(
            f"inference request batch-size must be <= {max_batch_size} for '{model}'"
        )
    return tensors, batch_size


def check_complete(names: Iterable[str], specs: dict[str, TensorSpec], model: str) -> None:
    """Raises InvalidRequest when an input that is not optional is missing."""
    required = [spec.name for spec in specs.values() if not spec.optional]
    missing = sorted(set(required).difference(names))
    if missing:
        got = sorted(names)
        raise InvalidRequest(
            f"expected number of inputs between {len(required)} and {len(specs)} but got {len(got)} inputs for model"
            f" '{model}'. Got input(s) {_listed(got)}, but missing required input(s) {_listed(missing)}. Please"
            " provide all required input(s)."
        )


def _listed(names: Sequence[str]) -> str:
    return f"[{','.join(repr(name) for name in names)}]"


def _check(given: Any, spec: TensorSpec, model: str, *, batched: bool) -> None:
    if given.datatype not in spec.data_types:
        raise InvalidRequest(
            f"inference input '{spec.name}' data-type is '{given.datatype}', but model '{model}' expects"
            f" '{spec.data_type}'"
        )
    if any(name.startswith("shared_memory") for name in given.parameters):
        raise InvalidRequest(
            f"input '{spec.name}' of model '{model}' is in shared memory, which this server does not read; send its"
            " contents"
        )
    expected, shape = (*((-1,) if batched else ()), *spec.dims), tuple(given.shape)
    fits = len(shape) == len(expected) and all(
        got == want or (want == -1 and got >= 0) for got, want in zip(shape, expected, strict=True)
    )
    if not fits or (batched and shape[0] < 1):
        raise InvalidRequest(
            f"unexpected shape for input '{spec.name}' for model '{model}'. Expected"
            f" {_dims(expected)}, got {_dims(shape)}." + (BATCH_DIMENSION_NOTE if batched else "")
        )


def _dims(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"


def _elements(given: Any, raw: Iterator[bytes] | None, model: str) -> array[Any] | Sequence[bytes]:
    """The elements, from wherever they stand; `raw` is None where all contents are typed."""
    count = math.prod(given.shape)
    if given.HasField("contents"):
        if raw is not None:
            raise InvalidRequest(
                "contents field must not be specified when using raw_input_contents for"
                f" '{given.name}' for model '{model}'"
            )
        return _typed(given, count, model)
    data = next(raw, b"") if raw is not None else b""
    if given.datatype == "BYTES":
        return _split(data, given.name, count)
    elements = array(ELEMENT_CODES[given.datatype])
    if len(data) != count * elements.itemsize:
        raise InvalidRequest(
            f"input byte size mismatch for input '{given.name}' for model '{model}'. Expected"
            f" {count * elements.itemsize}, got {len(data)}"
        )
    elements.frombytes(data)
    return elements


def _typed(given: Any, count: int, model: str) -> array[Any] | Sequence[bytes]:
    wanted = CONTENTS_FIELDS.get(given.datatype)
    for field, values in given.contents.ListFields():
        if field.name != wanted and len(values):
            raise InvalidRequest(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model '{model}' of type"
                f" '{field.name}', expected datatype '{given.datatype}'"
            )
    values = getattr(given.contents, wanted) if wanted else ()
    if len(values) != count:
        raise InvalidRequest(
            f"unexpected number of elements {len(values)} for inference input '{given.name}', expecting {count}"
        )
    if given.datatype == "BYTES":
        return tuple(values)
    try:
        return array(ELEMENT_CODES[given.datatype], values)
    except OverflowError as error:
        raise InvalidRequest(
            f"input '{given.name}' for model '{model}' holds a value that is no {given.datatype}: {error}"
        ) from error


def _split(data: bytes, name: str, count: int) -> Sequence[bytes]:
    """BYTES elements, each behind its length in four bytes."""
    elements: list[bytes] = []
    position = 0
    while position + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, position)
        position += 4 + length
        elements.append(data[position - length : position])
    if position != len(data):
        raise InvalidRequest(
            f"incomplete string length indicator or data for inference input '{name}'"
        )
    if len(elements) != count:
        raise InvalidRequest(
            f"unexpected number of string elements {len(elements)} for inference input '{name}', expecting {count}"
        )
    return elements
