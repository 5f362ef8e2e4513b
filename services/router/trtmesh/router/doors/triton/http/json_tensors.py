"""Tensor data in JSON."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.number_lists import pieces
from trtmesh.router.doors.triton.tensors import ELEMENT_CODES, Output, split_elements

BINARY_ONLY = ("FP16", "BF16")
"""Types without a JSON form."""
INTEGERS = (frozenset[type]({int}), "non-signed-integer", "signed-integer")
UNSIGNED = (frozenset[type]({int}), "non-unsigned-integer", "unsigned-integer")
JSON_KINDS: Mapping[str, tuple[frozenset[type], str, str]] = {
    "BYTES": (frozenset({str}), "non-string", "string"),
    "BOOL": (frozenset({bool}), "non-boolean", "boolean"),
    "FP32": (frozenset({int, float}), "non-number", "double"),
    **dict.fromkeys(("UINT8", "UINT32", "UINT64"), UNSIGNED),
}
"""The JSON types of a data type's elements, and Triton's words for others and for them; all else are INTEGERS."""


def flatten(data: Any) -> list[Any]:
    """The elements of a scalar or of nested lists, row by row."""
    return list(_elements(data)) if isinstance(data, list) else [data]


def _elements(data: list[Any]) -> Iterator[Any]:
    for element in data:
        if isinstance(element, list):
            yield from _elements(element)
        else:
            yield element


def read_elements(name: str, data_type: str, elements: Sequence[Any]) -> array[Any] | list[bytes]:
    """The elements of an input. Raises InvalidRequest."""
    if data_type in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {data_type} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    code = ELEMENT_CODES.get(data_type, "")
    if not code and data_type != "BYTES":
        raise InvalidRequest(f"invalid datatype '{data_type}' for input {name}")
    for piece in pieces(elements):
        _check_kinds(name, data_type, set(map(type, piece)))
    if data_type == "BYTES":
        return list(map(str.encode, elements))
    numbers = array(code)
    try:
        for piece in pieces(elements):
            numbers.extend(piece)
    except OverflowError as error:
        raise InvalidRequest(
            f"Unable to parse 'data': input '{name}' holds a value outside of {data_type}: {error}"
        ) from error
    return numbers


def _check_kinds(name: str, data_type: str, kinds: set[type]) -> None:
    """Raises InvalidRequest, in the words of Triton's JSON parser, for elements of another JSON type."""
    allowed, wrong, right = JSON_KINDS.get(data_type, INTEGERS)
    if not kinds <= allowed:
        data = "JSON bytes array" if data_type == "BYTES" else "'data'"
        raise InvalidRequest(
            f"Unable to parse {data}: attempt to access JSON {wrong} as {right} for input '{name}'"
        )


def values(output: Output) -> list[Any]:
    """The elements of an output, for JSON. Raises InvalidRequest for types without a JSON form."""
    if output.data_type in BINARY_ONLY:
        raise InvalidRequest(
            f"sending {output.data_type} data via JSON is not supported. Please use the binary data format for output"
        )
    if output.data_type == "BYTES":
        return [element.decode() for element in split_elements(output.data)]
    elements = array(ELEMENT_CODES[output.data_type])
    elements.frombytes(output.data)
    return [bool(value) for value in elements] if output.data_type == "BOOL" else elements.tolist()
