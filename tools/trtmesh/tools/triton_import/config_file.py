"""Parses `config.pbtxt`; placeholders of the template without a value count as unset."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from trtmesh.chassis.errors import SettingsError
from trtmesh.kserve import model_config_pb2

MAX_FILE_BYTES = 2**20
"""Largest accepted configuration."""

_TOKENS = re.compile(
    r"""(?P<quoted>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*)|(?P<unfilled>\$\{[^}\n]*\})"""
)
_MARK = "\x00"
_FIELD = re.compile(rf"(?P<name>\w+)\s*:\s*{_MARK}+[ \t]*[,;]?")
_LATER_ELEMENT = re.compile(rf",\s*{_MARK}+")
_FIRST_ELEMENT = re.compile(rf"{_MARK}+\s*,?")


@dataclass(frozen=True, slots=True)
class UnfilledValue:
    """A remaining `${key}`. `field` is the name of the field, or '' in a list."""

    field: str
    key: str


def read_limited(file: Path) -> str:
    """The text of a small file. Raises SettingsError."""
    try:
        if not file.is_file():
            raise SettingsError(f"{file} is no regular file")
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise SettingsError(
                f"{file} is larger than {MAX_FILE_BYTES} bytes, the limit of a configuration"
            )
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {file}: {error}") from error


def parse_config(text: str, file: Path) -> tuple[Any, Sequence[UnfilledValue]]:
    """The ModelConfig in the text of a file, and its unset values. Raises SettingsError with file and line."""
    text, unfilled = _blank_unfilled(text)
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(text, config)
    except text_format.ParseError as error:
        line = error.GetLine()
        # The parser begins its message with line and column.
        message = re.sub(r"^\d+:\d+ : ", "", str(error))
        where = f"{file}:{line}" if line is not None else str(file)
        raise SettingsError(f"{where}: {message}") from error
    return config, unfilled


def is_unset(text: str) -> bool:
    """Whether a parameter is empty or contains a placeholder."""
    return not text.strip() or re.search(r"\$\{[^}]*\}", text) is not None


def _blank_unfilled(text: str) -> tuple[str, list[UnfilledValue]]:
    """Blanks every `field: ${key}` outside of strings and comments; line numbers stay."""
    keys: list[str] = []

    def mark(match: re.Match[str]) -> str:
        if match["quoted"] is not None:
            return match[0]
        keys.append(match[0])
        return _MARK * len(match[0])

    # Configurations have no NUL; a stray NUL must not look like a mark.
    marked = _TOKENS.sub(mark, text.replace(_MARK, " "))
    if not keys:
        return marked, []
    waiting = iter(keys)

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    unfilled = [
        UnfilledValue(match["name"] or "", next(waiting))
        for match in re.finditer(rf"(?:(?P<name>\w+)\s*:\s*)?{_MARK}+", marked)
    ]
    for pattern in (_FIELD, _LATER_ELEMENT, _FIRST_ELEMENT):
        marked = pattern.sub(blank, marked)
    return marked, unfilled
