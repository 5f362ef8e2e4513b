"""The file format: one JSON object a line and item, a superset of Mooncake's traces.

Mooncake's fields are `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids` (one number a block of
512 prompt tokens, equal numbers for equal prefixes). A router also writes `block_tokens`, the size of its blocks,
`request_id`, `batch_index`, `model` and `error`, the reason word of what the item failed by; and of an item that a
worker took what was decided first: `policy`, `worker`, `cause`, `cached_tokens`. Lengths that nobody knows are null: of
a text that was never encoded, of the output of an item that no worker took.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ERROR_TABLE, InvalidRequest, NotFound, Unsupported

MOONCAKE_BLOCK_TOKENS = 512

MOST_MS = 1e15
"""Largest timestamp: above 30,000 years, and exact to the millisecond in floating point."""
MOST_TOKENS = 2**32 - 1
"""Largest length: what the protos can say."""

NEVER_WORK = {
    row.reason
    for row in ERROR_TABLE
    if issubclass(row.error, InvalidRequest | Unsupported | NotFound)
}
"""Reason words of items that no worker takes under any policy."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One item as it came. `blocks` are the hashes of its prompt's full blocks. A length that nobody knows is the
    mean of those that are known, and `guessed`."""

    seconds: float
    prompt_tokens: int
    new_tokens: int
    block_tokens: int
    blocks: tuple[int, ...]
    guessed: bool = False


def read_trace(file: Path) -> list[Arrival]:
    """The arrivals of a trace in order, the first at 0 s, without those that could never have been work for a worker.
    Raises InvalidRequest that names the line."""
    lines = []
    try:
        with file.open(encoding="utf-8") as text:
            for number, line in enumerate(text, 1):
                if line.strip():
                    lines.append(_parse(line, f"{file}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the trace {file}: {error}") from error
    lines = [line for line in lines if line.new_tokens is not None or line.error not in NEVER_WORK]
    if not lines:
        raise InvalidRequest(f"the trace {file} has no arrivals")
    lines.sort(key=lambda line: line.seconds)
    prompt_tokens = _mean((line.prompt_tokens for line in lines), least=1)
    new_tokens = _mean((line.new_tokens for line in lines), least=0)
    return [
        Arrival(
            line.seconds - lines[0].seconds,
            prompt_tokens if line.prompt_tokens is None else line.prompt_tokens,
            new_tokens if line.new_tokens is None else line.new_tokens,
            line.block_tokens,
            line.blocks,
            guessed=line.prompt_tokens is None or line.new_tokens is None,
        )
        for line in lines
    ]


def _mean(lengths: Iterable[int | None], least: int) -> int:
    known = [length for length in lengths if length is not None]
    return round(sum(known) / len(known)) if known else least


@dataclass(frozen=True, slots=True)
class _Line:
    """An arrival as it is written."""

    seconds: float
    prompt_tokens: int | None
    new_tokens: int | None
    block_tokens: int
    blocks: tuple[int, ...]
    error: str


def _parse(line: str, where: str) -> _Line:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InvalidRequest(f"{where} is not an object")
    prompt_tokens = _length(record, "input_length", where, least=1)
    block_tokens = _whole(
        record.get("block_tokens", MOONCAKE_BLOCK_TOKENS), f"{where}: block_tokens", least=1
    )
    hashes = record.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes):
        raise InvalidRequest(f"{where}: hash_ids must be a list of whole numbers")
    return _Line(
        _milliseconds(record, "timestamp", where) / 1000,
        prompt_tokens,
        _length(record, "output_length", where, least=0),
        block_tokens,
        # A last block that is not full is named in Mooncake's traces, but its KV is not reused.
        tuple(hashes[: (prompt_tokens or 0) // block_tokens]),
        str(record.get("error", "")),
    )


def _milliseconds(record: Mapping[str, Any], field: str, where: str) -> float:
    value = record.get(field)
    # Python's JSON has NaN and Infinity, and makes infinity of 1e400; a whole number may have any size.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_MS:
        raise InvalidRequest(
            f"{where}: {field} is {value!r} but must be milliseconds of at most {MOST_MS:g} either way"
        )
    return value


def _length(record: Mapping[str, Any], field: str, where: str, *, least: int) -> int | None:
    """A number of tokens; None where a router wrote that it does not know it."""
    if field in record and record[field] is None:
        return None
    return _whole(record.get(field), f"{where}: {field}", least=least)


def _whole(value: object, field: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS:
        raise InvalidRequest(
            f"{field} is {value!r} but must be a whole number of {least} to {MOST_TOKENS}"
        )
    return value
