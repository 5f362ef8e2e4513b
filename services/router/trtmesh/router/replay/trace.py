"""The file format: one JSON object a line and item, a superset of Mooncake's traces.

Mooncake's fields are `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids` (one number a block of
512 prompt tokens, equal numbers for equal prefixes). A router also writes `block_tokens` where its blocks have another
size, and what it decided: `request_id`, `batch_index`, `model`, `policy`, `worker`, `cause`, `cached_tokens`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import InvalidRequest

MOONCAKE_BLOCK_TOKENS = 512

MOST_MS = 1e15
"""Largest timestamp: above 30,000 years, and exact to the millisecond in floating point."""
MOST_TOKENS = 2**32 - 1
"""Largest length: what the protos can say."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One item as it came. `blocks` are the hashes of its prompt's full blocks."""

    seconds: float
    prompt_tokens: int
    new_tokens: int
    block_tokens: int
    blocks: tuple[int, ...]


def read_trace(file: Path) -> list[Arrival]:
    """The arrivals of a trace in order, the first at 0 s. Raises InvalidRequest that names the line."""
    arrivals = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    arrivals.append(_parse(line, f"{file}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the trace {file}: {error}") from error
    if not arrivals:
        raise InvalidRequest(f"the trace {file} has no arrivals")
    arrivals.sort(key=lambda arrival: arrival.seconds)
    first = arrivals[0].seconds
    return [
        Arrival(a.seconds - first, a.prompt_tokens, a.new_tokens, a.block_tokens, a.blocks)
        for a in arrivals
    ]


def _parse(line: str, where: str) -> Arrival:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidRequest(f"{where} is not an object")
    prompt = _whole(record, "input_length", where, least=1)
    block_tokens = _whole(record, "block_tokens", where, least=1, default=MOONCAKE_BLOCK_TOKENS)
    hashes = record.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes):
        raise InvalidRequest(f"{where}: hash_ids must be a list of whole numbers")
    return Arrival(
        _milliseconds(record, "timestamp", where) / 1000,
        prompt,
        _whole(record, "output_length", where, least=0),
        block_tokens,
        # A last block that is not full is named in Mooncake's traces, but its KV is not reused.
        tuple(hashes[: prompt // block_tokens]),
    )


def _milliseconds(record: Mapping[str, Any], field: str, where: str) -> float:
    value = record.get(field)
    # Python's JSON has NaN and Infinity, and makes infinity of 1e400; a whole number may have any size.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_MS:
        raise InvalidRequest(
            f"{where}: {field} is {value!r} but must be milliseconds of at most {MOST_MS:g} either way"
        )
    return value


def _whole(
    record: Mapping[str, Any], field: str, where: str, *, least: int, default: int | None = None
) -> int:
    value = record.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS:
        raise InvalidRequest(
            f"{where}: {field} is {value!r} but must be a whole number of {least} to {MOST_TOKENS}"
        )
    return value
