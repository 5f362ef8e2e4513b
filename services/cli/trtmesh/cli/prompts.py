"""Prompts of a command line: texts, files and standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

PROMPTS_HELP = "Prompts: texts, @FILE for a file, - for standard input; @@ begins a text with @."

LinesOption = Annotated[
    bool,
    typer.Option("--lines", help="Each line of a file or of standard input is a prompt."),
]


def read_prompts(arguments: Sequence[str], *, lines: bool) -> list[str]:
    """Returns the prompts of the arguments; with `lines` each line of a file is a prompt, unless blank."""
    return [prompt for argument in arguments for prompt in _read(argument, lines=lines)]


def _read(argument: str, *, lines: bool) -> list[str]:
    if argument.startswith("@@"):
        return [argument[1:]]
    if argument != "-" and not argument.startswith("@"):
        return [argument]
    source = "standard input" if argument == "-" else argument[1:]
    text = _read_stdin() if argument == "-" else _read_file(source)
    prompts = [line for line in text.splitlines() if line.strip()] if lines else [text]
    if not any(prompts):
        raise typer.BadParameter(f"{source} has no prompt")
    return prompts


def _read_file(name: str) -> str:
    try:
        return read_text(Path(name))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error}; @@ begins a text with @") from error


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"standard input is not text: {error}") from error


def read_text(file: Path) -> str:
    """The text of a file of the command line. Raises BadParameter."""
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise typer.BadParameter(f"cannot read {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{str(file)!r} is not UTF-8 text: {error}") from error
