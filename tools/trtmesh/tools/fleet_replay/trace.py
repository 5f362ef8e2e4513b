"""Traces: lengths and times of recorded items, and which prompts begin alike.

A line of JSON each, a superset of Mooncake's:

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

The input length is unknown for a text without ids yet, the output length for an item without a worker. A `.csv` is
BurstGPT's, or Azure's of 2023 and 2024, which say nothing of prefixes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from trtmesh.chassis.errors import ERROR_TABLE, InvalidRequest, NotFound, Unsupported
from trtmesh.tools.records import as_json, checked, csv_rows, lines_of

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

Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
NewTokens = Annotated[int, Field(ge=0, le=MOST_TOKENS)]


class Mooncake(BaseModel):
    """A line of a Mooncake trace, or of a router's record, whose other fields say what became of the item."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    timestamp: Annotated[float, Field(ge=-MOST_MS, le=MOST_MS, allow_inf_nan=False)]
    input_length: Tokens | None
    output_length: NewTokens | None
    hash_ids: list[int] = []
    block_tokens: Tokens = MOONCAKE_BLOCK_TOKENS
    error: str = ""
    adapter: str = ""
    adapter_rank: NewTokens = 0

    @property
    def seconds(self) -> float:
        return self.timestamp / 1000


class BurstGpt(BaseModel):
    """A row of BurstGPT, with times in seconds; a request without response tokens had failed."""

    seconds: Annotated[float, Field(alias="Timestamp", ge=0, le=MOST_MS, allow_inf_nan=False)]
    input_length: Annotated[NewTokens, Field(alias="Request tokens")]
    output_length: Annotated[NewTokens, Field(alias="Response tokens")]


class Azure(BaseModel):
    """A row of Azure's traces of 2023 and 2024."""

    at: Annotated[datetime, Field(alias="TIMESTAMP")]
    input_length: Annotated[Tokens, Field(alias="ContextTokens")]
    output_length: Annotated[Tokens, Field(alias="GeneratedTokens")]

    @property
    def seconds(self) -> float:
        return self.at.timestamp()


_TABLES: tuple[type[BurstGpt | Azure], ...] = (BurstGpt, Azure)


def read_csv(path: Path) -> Iterator[tuple[str, BurstGpt | Azure]]:
    """The rows with their places. Raises as `csv_rows`."""
    for where, row in csv_rows(path):
        for kind in _TABLES:
            if {str(field.alias) for field in kind.model_fields.values()} <= row.keys():
                read = checked(kind, row, where)
                if read.input_length and read.output_length:
                    yield where, read
                break
        else:
            raise InvalidRequest(
                f"has the columns {', '.join(sorted(map(str, row)))}, which are neither BurstGPT's (Timestamp,"
                " Request tokens, Response tokens) nor Azure's (TIMESTAMP, ContextTokens, GeneratedTokens)",
                field=f"{path}:1",
            )


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
    lines = [
        line for line in lines if line.output_length is not None or line.error not in NEVER_WORK
    ]
    if not lines:
        raise InvalidRequest("has no arrivals", field=", ".join(map(str, files)))
    lines.sort(key=lambda line: line.seconds)
    prompt_tokens = _mean((line.input_length for line in lines), least=1)
    new_tokens = _mean((line.output_length for line in lines), least=0)
    return [
        Arrival(
            line.seconds - lines[0].seconds,
            prompt_tokens if line.input_length is None else line.input_length,
            new_tokens if line.output_length is None else line.output_length,
            line.block_tokens,
            # Mooncake's traces name a partial last block, whose KV is not reused.
            tuple(line.hash_ids[: (line.input_length or 0) // line.block_tokens]),
            guessed=line.input_length is None or line.output_length is None,
            adapter=line.adapter,
            adapter_rank=line.adapter_rank,
        )
        for line in lines
    ]


def _lines_of(file: Path) -> Iterator[Mooncake]:
    """The items of a file. Raises InvalidRequest."""
    try:
        if file.suffix.lower() == ".csv":
            for _, row in read_csv(file):
                yield Mooncake(
                    timestamp=row.seconds * 1000,
                    input_length=row.input_length,
                    output_length=row.output_length,
                )
            return
        first = True
        for where, line in lines_of(file):
            try:
                yield checked(Mooncake, as_json(where, line), where)
            except InvalidRequest:
                # A last line may have been cut off while it was written.
                if first or line.endswith(b"\n"):
                    raise
            first = False
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"the trace cannot be read: {error}", field=str(file)) from error


def _mean(lengths: Iterable[int | None], least: int) -> int:
    known = [length for length in lengths if length is not None]
    return round(sum(known) / len(known)) if known else least
