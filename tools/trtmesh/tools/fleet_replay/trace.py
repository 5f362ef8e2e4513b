"""The trace format: a JSON object per item and line, a superset of Mooncake's.

| field | from | meaning |
|---|---|---|
| `timestamp` | Mooncake | arrival in ms |
| `input_length`, `output_length` | Mooncake | tokens; null if unknown |
| `hash_ids` | Mooncake | a number per prompt block, equal for equal prefixes; 512 tokens per block by default |
| `block_tokens` | router | size of the blocks |
| `request_id`, `batch_index`, `model` | router | name of the item |
| `adapter`, `adapter_rank` | router | name of the item's LoRA and its largest rank, 0 if unknown; absent without one |
| `error` | router | reason word of a failed item, else '' |
| `policy`, `worker`, `cause`, `cached_tokens` | router | the first placement; absent without one |

The input length is unknown for a text without ids yet, the output length for an item without a worker.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtmesh.chassis.errors import ERROR_TABLE, InvalidField, InvalidRequest, NotFound, Unsupported
from trtmesh.chassis.json_text import load_json

MOONCAKE_BLOCK_TOKENS = 512

MOST_MS = 1e15
"""Largest timestamp: above 30,000 years, and exact to the millisecond in floating point."""
MOST_TOKENS = 2**24
"""Largest length: beyond every model's, and little enough to be simulated."""

NEVER_WORK = {
    row.reason
    for row in ERROR_TABLE
    if issubclass(row.error, InvalidRequest | Unsupported | NotFound)
}
"""Reason words of items without a worker under every policy."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """An item at arrival, with the hashes of full prompt blocks.

    An unknown length is the mean of the known ones, and `guessed` is set.
    """

    seconds: float
    prompt_tokens: int
    new_tokens: int
    block_tokens: int
    blocks: tuple[int, ...]
    guessed: bool = False
    adapter: str = ""
    """Name of the LoRA, or ''."""
    adapter_rank: int = 0


def read_trace(*files: Path) -> list[Arrival]:
    """The arrivals of traces in order, the first at 0 s, without unservable items; `-` is standard input.

    Raises InvalidRequest with file and line.
    """
    lines = [line for file in files for line in _lines_of(file)]
    lines = [line for line in lines if line.new_tokens is not None or line.error not in NEVER_WORK]
    if not lines:
        raise InvalidRequest("has no arrivals", field=", ".join(map(str, files)))
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
            adapter=line.adapter,
            adapter_rank=line.adapter_rank,
        )
        for line in lines
    ]


def _lines_of(file: Path) -> Iterator[_Line]:
    """The lines of a file, without a last one that was cut off while it was written. Raises InvalidRequest."""
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as content:
            for number, line in enumerate(content, 1):
                try:
                    if line.strip():
                        yield _parse(line.decode(), f"{file}:{number}")
                except (InvalidRequest, UnicodeDecodeError):
                    if number == 1 or line.endswith(b"\n"):
                        raise
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the trace cannot be read: {error}", field=str(file)) from error


def _mean(lengths: Iterable[int | None], least: int) -> int:
    known = [length for length in lengths if length is not None]
    return round(sum(known) / len(known)) if known else least


@dataclass(frozen=True, slots=True)
class _Line:
    seconds: float
    prompt_tokens: int | None
    new_tokens: int | None
    block_tokens: int
    blocks: tuple[int, ...]
    error: str
    adapter: str
    adapter_rank: int


def _parse(line: str, where: str) -> _Line:
    try:
        record = load_json(line)
    except ValueError as error:
        raise InvalidRequest(f"is not JSON: {error}", field=where) from error
    if not isinstance(record, dict):
        raise InvalidRequest("is not an object", field=where)
    prompt_tokens = _length(record, "input_length", where, least=1)
    block_tokens = _whole(
        record.get("block_tokens", MOONCAKE_BLOCK_TOKENS), f"{where}: block_tokens", least=1
    )
    hashes = record.get("hash_ids", [])
    if not isinstance(hashes, list) or not all(isinstance(each, int) for each in hashes):
        raise InvalidRequest("must be a list of whole numbers", field=f"{where}: hash_ids")
    return _Line(
        _milliseconds(record, "timestamp", where) / 1000,
        prompt_tokens,
        _length(record, "output_length", where, least=0),
        block_tokens,
        # Mooncake's traces name a partial last block, whose KV is not reused.
        tuple(hashes[: (prompt_tokens or 0) // block_tokens]),
        str(record.get("error", "")),
        _name(record.get("adapter", ""), f"{where}: adapter"),
        _whole(record.get("adapter_rank", 0), f"{where}: adapter_rank", least=0),
    )


def _milliseconds(record: Mapping[str, Any], field: str, where: str) -> float:
    value = record.get(field)
    # Python's JSON accepts NaN and Infinity, reads 1e400 as infinity, and whole numbers of any size.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_MS:
        limit = f"milliseconds of at most {MOST_MS:g} either way"
        raise InvalidField.of(f"{where}: {field}", value, limit)
    return value


def _length(record: Mapping[str, Any], field: str, where: str, *, least: int) -> int | None:
    """A number of tokens; None if unknown to the router."""
    if field in record and record[field] is None:
        return None
    return _whole(record.get(field), f"{where}: {field}", least=least)


def _name(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidField.of(field, value, "a string")
    return value


def _whole(value: object, field: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_TOKENS:
        raise InvalidField.of(field, value, f"a whole number of {least} to {MOST_TOKENS}")
    return value
