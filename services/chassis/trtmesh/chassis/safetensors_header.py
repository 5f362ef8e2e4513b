"""Reads the header of a safetensors file: names, types, shapes and positions of the tensors, and no value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.json_text import load_json

MOST_HEADER_BYTES = 2**20
"""Largest header: room for the most tensors of an adapter. The library takes 100 MB, which hold every thread of the
process up for a second."""
MOST_DIMENSIONS = 8
_LENGTH_BYTES = 8
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL"), 1),
}
"""Bytes of a value by the name of the type."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    """Positions of the bytes in the file."""


def read_entries(data: bytes, name: str) -> dict[str, Entry]:
    """The tensors by name, in the order of their bytes, which fill the file. Raises InvalidRequest with `name` for
    anything but a whole and valid file."""
    try:
        header, start = _header(data)
        entries: dict[str, Entry] = {}
        end = start
        for key, told in sorted(header.items(), key=lambda each: each[1]["data_offsets"]):
            entries[key] = entry = _entry(told, start)
            if entry.begin != end:
                raise ValueError(
                    f"{key[:80]} begins at {entry.begin - start}, not at {end - start}"
                )
            end = entry.end
        if end != len(data):
            raise ValueError(
                f"has {len(data) - start} bytes of values, but its header describes {end - start}"
            )
    except Exception as error:
        # Broad on purpose: a broken file fails in many types.
        problem = f"is not a readable safetensors file: {error}"
        raise InvalidRequest(problem, field=name) from error
    return entries


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Entries by key, and the position of the first value."""
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if not 0 < length <= MOST_HEADER_BYTES:
        raise ValueError(f"its header takes {length} bytes, not 1 to {MOST_HEADER_BYTES}")
    if end > len(data):
        raise ValueError(f"its header of {length} bytes is cut off")
    header = load_json(data[_LENGTH_BYTES:end])
    header.pop("__metadata__", None)
    return header, end


def _entry(told: dict[str, Any], start: int) -> Entry:
    dtype, shape = told["dtype"], told["shape"]
    first, last = told["data_offsets"]
    if len(shape) > MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}"[:200])
    if prod(shape) * ITEM_BYTES[dtype] != last - first:
        raise ValueError(f"{dtype} {shape} takes other than {last - first} bytes")
    return Entry(dtype, tuple(shape), start + first, start + last)
