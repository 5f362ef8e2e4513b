"""Tensor data between JSON and the raw bytes of KServe messages."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.tensors import ELEMENT_CODES, Output, split_elements, text_data

BINARY_ONLY = ("FP16", "BF16")
"""Types without a JSON form."""


def flatten(data: Any) -> list[Any]:
    """The elements of a scalar or of nested lists, row by row."""
    return list(_elements(data)) if isinstance(data, list) else [data]


def _elements(data: list[Any]) -> Iterator[Any]:
    for element in data:
        if isinstance(element, list):
            yield from _elements(element)
        else:
            yield element


def raw_data(name: str, data_type: str, elements: Sequence[Any]) -> bytes:
    """The elements of an input as raw tensor contents. Raises InvalidRequest."""
    if data_type in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {data_type} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    kinds = set(map(type, elements))
    if data_type == "BYTES":
        _expect(name, data_type, kinds, {str}, "strings")
        return text_data(elements)
    if data_type == "BOOL":
        _expect(name, data_type, kinds, {bool}, "true or false")
        return bytes(elements)
    code = ELEMENT_CODES.get(data_type)
    if code is None:
        raise InvalidRequest(f"invalid datatype '{data_type}' for input {name}")
    real = data_type == "FP32"
    _expect(
        name, data_type, kinds, {int, float} if real else {int}, "numbers" if real else "integers"
    )
    try:
        return array(code, elements).tobytes()
    except OverflowError as error:
        raise InvalidRequest(
            f"Unable to parse 'data': input '{name}' holds a value outside of {data_type}: {error}"
        ) from error


def _expect(name: str, data_type: str, kinds: set[type], allowed: set[type], words: str) -> None:
    if not kinds <= allowed:
        raise InvalidRequest(
            f"Unable to parse 'data': input '{name}' of type {data_type} must hold {words}"
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
