"""Records of a file, a line of JSON or a row of CSV each. Errors name file and line."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from trtmesh.chassis.errors import InvalidRequest

MOST_LINE_BYTES = 1 << 24

STANDARD_INPUT = Path("-")

R = TypeVar("R", bound=BaseModel)


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, with their places. Raises InvalidRequest and OSError."""
    with nullcontext(sys.stdin.buffer) if path == STANDARD_INPUT else path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE_BYTES + 1), b""), 1):
            where = f"{path}:{number}"
            if len(line) > MOST_LINE_BYTES:
                raise InvalidRequest(f"is longer than {MOST_LINE_BYTES} bytes", field=where)
            if line.strip():
                yield where, line


def csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a table with its columns in the first line, with their places. Raises InvalidRequest, OSError,
    UnicodeDecodeError and csv.Error."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        table = csv.DictReader(_bounded(path, file))
        for row in table:
            yield f"{path}:{table.line_num}", row


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


def checked(kind: type[R], value: object, where: str) -> R:
    """The record of a pydantic model. Raises InvalidRequest."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise InvalidRequest(first["msg"], field=f"{where}: {field}" if field else where) from error
