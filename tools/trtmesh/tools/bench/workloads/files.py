"""Workloads and traces of files, in the formats of other tools."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.tools.bench.workloads.lengths import MOST_TOKENS
from trtmesh.tools.bench.workloads.rows import Part, Row

BLOCK_TOKENS = 512
"""Of a hash id of Mooncake."""

MOST_LINE_BYTES = 1 << 24
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


class Mooncake(BaseModel):
    """A line of a Mooncake trace, or of a router's record, whose other fields say what became of the request."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    timestamp: Milliseconds
    input_length: Tokens
    output_length: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    hash_ids: list[int] = []
    block_tokens: Tokens = BLOCK_TOKENS
    adapter: str = ""

    def rows(self, where: str) -> Iterator[Row]:
        size, left = self.block_tokens, self.input_length
        parts = []
        for block in self.hash_ids[: -(-left // size)]:
            parts.append(Part(f"block {block}", min(size, left)))
            left -= parts[-1].tokens
        if left:
            parts.append(Part(_place(where), left))
        # Some were cut off before their first token when they were recorded.
        tokens, at = max(1, self.output_length), self.timestamp / 1000
        yield Row(where, parts=tuple(parts), output_tokens=tokens, at_s=at, adapter=self.adapter)


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
    for where, line in _lines(path):
        fields = as_json(where, line)
        known = [
            each for name, each in _LINES.items() if isinstance(fields, dict) and name in fields
        ]
        if not known:
            raise InvalidRequest(f"must be an object with one of {', '.join(_LINES)}", field=where)
        yield from checked(known[0], fields, where).rows(where)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, with their places."""
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), 1):
            where = f"{path}:{number}"
            if len(line) > MOST_LINE_BYTES:
                raise InvalidRequest(f"is longer than {MOST_LINE_BYTES} bytes", field=where)
            if line.strip():
                yield where, line


def _lines_of_text(path: Path) -> Iterator[Row]:
    """evalscope's `line_by_line`."""
    for where, line in _lines(path):
        yield Row(where, line.decode().strip())


class Said(_Record):
    """A message of ShareGPT."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

    speaker: Annotated[str, Field(alias="from")]
    value: str


class ShareGpt(BaseModel):
    """A conversation, of which the first message and the length of its answer are taken, as vLLM does."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)

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
    for name, kind in (("samples", Sample), ("", ShareGpt)):
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


class BurstGpt(BaseModel):
    """A row of BurstGPT, with times in seconds."""

    at: Annotated[float, Field(alias="Timestamp", ge=0, le=MOST_MS, allow_inf_nan=False)]
    prompt: Annotated[int, Field(alias="Request tokens", ge=0, le=MOST_TOKENS)]
    answer: Annotated[int, Field(alias="Response tokens", ge=0, le=MOST_TOKENS)]

    def rows(self, where: str) -> Iterator[Row]:
        # Without response tokens a request had failed.
        if self.prompt and self.answer:
            yield Row(
                where,
                parts=(Part(_place(where), self.prompt),),
                output_tokens=self.answer,
                at_s=self.at,
            )


class Azure(BaseModel):
    """A row of Azure's traces of 2023 and 2024."""

    at: Annotated[datetime, Field(alias="TIMESTAMP")]
    prompt: Annotated[int, Field(alias="ContextTokens", ge=1, le=MOST_TOKENS)]
    answer: Annotated[int, Field(alias="GeneratedTokens", ge=1, le=MOST_TOKENS)]

    def rows(self, where: str) -> Iterator[Row]:
        at = self.at.timestamp()
        yield Row(
            where, parts=(Part(_place(where), self.prompt),), output_tokens=self.answer, at_s=at
        )


def _csv(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(_bounded(path, file))
        columns = set(table.fieldnames or ())
        for kind in (BurstGpt, Azure):
            if {str(field.alias) for field in kind.model_fields.values()} <= columns:
                for row in table:
                    where = f"{path}:{table.line_num}"
                    yield from checked(kind, row, where).rows(where)
                return
    raise InvalidRequest(
        f"has the columns {', '.join(sorted(columns))}, which are neither BurstGPT's (Timestamp, Request tokens,"
        " Response tokens) nor Azure's (TIMESTAMP, ContextTokens, GeneratedTokens)",
        field=f"{path}:1",
    )


def _bounded(path: Path, file: IO[str]) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), ""), 1):
        if len(line) > MOST_LINE_BYTES:
            raise InvalidRequest(
                f"is longer than {MOST_LINE_BYTES} characters", field=f"{path}:{number}"
            )
        yield line


def as_json(where: str, content: bytes) -> Any:
    """Raises InvalidRequest."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"is not JSON: {error}", field=where) from error


def checked(kind: Any, value: object, where: str) -> Any:
    """The record of a pydantic model. Raises InvalidRequest."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidRequest(first["msg"], field=f"{where}: {field}" if field else where) from error
