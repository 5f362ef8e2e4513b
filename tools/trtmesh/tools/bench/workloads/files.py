"""Workloads and traces of files, in the formats of other tools."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.workloads.lengths import MOST_TOKENS
from trtmesh.tools.bench.workloads.rows import Part, Row
from trtmesh.tools.fleet_replay.trace import Mooncake, read_csv
from trtmesh.tools.records import as_json, checked, lines_of

MOST_JSON_BYTES = 1 << 30
"""A whole JSON file: the largest in use, ShareGPT's, has 640 MB."""

MOST_MS = 1e12
"""Of a timestamp or a delay: 30 years."""

Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Milliseconds = Annotated[float, Field(ge=-MOST_MS, le=MOST_MS, allow_inf_nan=False)]
Delay = Annotated[float, Field(ge=0, le=MOST_MS, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]


def read_rows(path: Path, limit: int) -> list[Row]:
    """The first `limit` requests of a file, all turns of a session counted. Raises InvalidRequest with file and
    line."""
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".jsonl": _json_lines,
        ".json": _whole_json,
        ".csv": _csv,
        ".txt": _lines_of_text,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InvalidRequest(f"must end in one of {', '.join(readers)}", field=str(path))
    try:
        rows = [*islice(reader(path), limit)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidRequest(f"cannot be read: {error}", field=str(path)) from error
    if not rows:
        raise InvalidRequest("has no requests", field=str(path))
    return rows


class _Record(BaseModel):
    """A record whose every field is used: one with another field asks for what is not done here."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SingleTurn(_Record):
    """aiperf's `single_turn`."""

    text: Text
    output_length: Tokens | None = None
    timestamp: Milliseconds | None = None
    delay: Delay = 0.0

    def rows(self, where: str) -> Iterator[Row]:
        at = None if self.timestamp is None else (self.timestamp + self.delay) / 1000
        yield Row(where, self.text, output_tokens=self.output_length, at_s=at)


class MultiTurn(_Record):
    """aiperf's `multi_turn`: each turn follows the answer of the one before."""

    turns: Annotated[list[Text | SingleTurn], Field(min_length=1)]
    session_id: Text | None = None

    def rows(self, where: str) -> Iterator[Row]:
        turns = [SingleTurn(text=turn) if isinstance(turn, str) else turn for turn in self.turns]
        at = turns[0].timestamp
        for turn in turns:
            yield Row(
                where,
                turn.text,
                output_tokens=turn.output_length,
                at_s=None if at is None else at / 1000,
                session=self.session_id or where,
                delay_s=turn.delay / 1000,
            )


def _mooncake(record: Mooncake, where: str) -> Iterator[Row]:
    if record.input_length is None or record.output_length is None:
        raise InvalidRequest(
            "has no length, since the item failed when it was recorded", field=where
        )
    size, left = record.block_tokens, record.input_length
    parts = []
    for block in record.hash_ids[: -(-left // size)]:
        parts.append(Part(f"block {block}", min(size, left)))
        left -= parts[-1].tokens
    if left:
        parts.append(Part(_place(where), left))
    # Some were cut off before their first token when they were recorded.
    tokens = max(1, record.output_length)
    yield Row(
        where, parts=tuple(parts), output_tokens=tokens, at_s=record.seconds, adapter=record.adapter
    )


class Custom(_Record):
    """vLLM's `custom`."""

    prompt: Text
    output_tokens: Tokens | None = None

    def rows(self, where: str) -> Iterator[Row]:
        yield Row(where, self.prompt, output_tokens=self.output_tokens)


_LINES: dict[str, type[SingleTurn | MultiTurn | Mooncake | Custom]] = {
    "turns": MultiTurn,
    "text": SingleTurn,
    "prompt": Custom,
    "input_length": Mooncake,
}
"""The formats of lines of JSON by a field that only one has."""


def _place(where: str) -> str:
    """The line without the file, whose name says nothing about its text."""
    return where.rpartition(":")[2]


def _json_lines(path: Path) -> Iterator[Row]:
    for where, line in lines_of(path):
        fields = as_json(where, line)
        known = [
            each for name, each in _LINES.items() if isinstance(fields, dict) and name in fields
        ]
        if not known:
            raise InvalidRequest(f"must be an object with one of {', '.join(_LINES)}", field=where)
        record = checked(known[0], fields, where)
        yield from _mooncake(record, where) if isinstance(record, Mooncake) else record.rows(where)


def _lines_of_text(path: Path) -> Iterator[Row]:
    """evalscope's `line_by_line`."""
    for where, line in lines_of(path):
        yield Row(where, line.decode().strip())


class Said(BaseModel):
    """A message of ShareGPT."""

    value: str


class ShareGpt(BaseModel):
    """A conversation, of which the first message and the length of its answer are taken, as vLLM does."""

    conversations: list[Said]

    def rows(self, where: str) -> Iterator[Row]:
        said = self.conversations
        if len(said) > 1 and said[0].value.strip() and said[1].value:
            yield Row(where, said[0].value, answer=said[1].value)


class Sample(_Record):
    """A sample of TensorRT-LLM's `gptManagerBenchmark`."""

    input_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
    output_len: Tokens
    input_len: int | None = None
    task_id: int = -1

    def rows(self, where: str) -> Iterator[Row]:
        if self.input_len not in (None, len(self.input_ids)):
            raise InvalidRequest(
                f"input_len is {self.input_len} but input_ids has {len(self.input_ids)}",
                field=where,
            )
        adapter = str(self.task_id) if self.task_id >= 0 else ""
        yield Row(where, ids=tuple(self.input_ids), output_tokens=self.output_len, adapter=adapter)


def read_whole(path: Path) -> bytes:
    """Raises InvalidRequest."""
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise InvalidRequest(f"has more than {MOST_JSON_BYTES} bytes", field=str(path))
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"cannot be read: {error}", field=str(path)) from error


def _whole_json(path: Path) -> Iterator[Row]:
    content = as_json(str(path), read_whole(path))
    kinds: dict[str, type[Sample | ShareGpt]] = {"samples": Sample, "": ShareGpt}
    for name, kind in kinds.items():
        entries = content.get(name) if isinstance(content, dict) else content if not name else None
        if isinstance(entries, list):
            for number, entry in enumerate(entries):
                where = f"{path}: {name}[{number}]"
                yield from checked(kind, entry, where).rows(where)
            return
    raise InvalidRequest(
        "must be a list of conversations (ShareGPT), or an object with `samples` (gptManagerBenchmark)",
        field=str(path),
    )


def _csv(path: Path) -> Iterator[Row]:
    for where, row in read_csv(path):
        parts = (Part(_place(where), row.input_length),)
        yield Row(where, parts=parts, output_tokens=row.output_length, at_s=row.seconds)
