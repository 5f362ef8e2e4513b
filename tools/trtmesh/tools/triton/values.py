"""Values of the command line: JSON, token ids, and the files that hold either or arrays."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import typer
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.json_text import load_json
from trtmesh.cli.prompts import read_text
from trtmesh.tools.triton.npy import read_npy
from trtmesh.tools.triton.tensors import Array

FILES = ".npy, .csv or .json"


def read_ids(text: str) -> list[list[int]]:
    """Prompts of token ids: '1 2 3', or @FILE.csv with one a row. Raises BadParameter."""
    if text.startswith("@"):
        return read_rows(Path(text[1:]))
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise typer.BadParameter(f"--ids {text!r} must be numbers, as '1 2 3', or @FILE.csv")
    return [ids]


def read_input(text: str) -> tuple[str, Any]:
    """An input: NAME=JSON or NAME=@FILE. Raises BadParameter."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise typer.BadParameter(f"--input {text!r} must be NAME=JSON or NAME=@FILE")
    if value.startswith("@"):
        return name, _read_file(Path(value[1:]))
    try:
        return name, load_json(value)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"--input {name}: {error}") from error


def _read_file(file: Path) -> Any:
    """An array, the only row of token ids, or JSON."""
    match file.suffix:
        case ".npy":
            return read_array(file)
        case ".csv":
            rows = read_rows(file)
            return rows[0] if len(rows) == 1 else rows
        case ".json":
            return read_json(file)
    raise typer.BadParameter(f"{str(file)!r} must be a file {FILES}")


def read_array(file: Path) -> Array:
    """The array of a .npy file. Raises BadParameter."""
    try:
        return read_npy(file)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def read_rows(file: Path) -> list[list[int]]:
    """The rows of token ids of a .csv file. Raises BadParameter."""
    lines = csv.reader(io.StringIO(read_text(file)))
    try:
        rows = [[int(cell) for cell in line] for line in lines if line]
    except (ValueError, csv.Error) as error:
        raise typer.BadParameter(f"{str(file)!r} must have token ids: {error}") from error
    if not rows:
        raise typer.BadParameter(f"{str(file)!r} has no token ids")
    return rows


def read_json(file: Path) -> Any:
    """Raises BadParameter."""
    try:
        return load_json(read_text(file))
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"{str(file)!r} is not JSON: {error}") from error
