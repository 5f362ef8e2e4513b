"""Fills the placeholders of templates as upstream's `fill_template.py` does, from the same arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Template

from trtmesh.chassis.errors import SettingsError

ALWAYS_FILLED: Mapping[str, str] = {"max_queue_size": "0", "max_queue_delay_microseconds": "0"}
"""Values that upstream's script fills in unless its arguments name others."""


def parse_values(arguments: Sequence[str]) -> dict[str, str]:
    """Reads `key:value,key2:value2`. A backslash escapes a comma; a colon takes two. Raises SettingsError."""
    values: dict[str, str] = {}
    for text in (part for argument in arguments for part in _split(argument, ",")):
        parts = list(_split(text, ":"))
        if len(parts) != 2:
            raise SettingsError(
                f"--fill has {text!r} but must be KEY:VALUE,KEY:VALUE; a comma of a value is written \\, and a colon"
                " \\\\:"
            )
        key, value = parts
        if values.setdefault(key, value) != value:
            raise SettingsError(f"--fill gives {key!r} two values: {values[key]!r} and {value!r}")
    return values


def _split(text: str, delimiter: str) -> Iterator[str]:
    """Splits at unescaped delimiters and removes one level of escapes."""
    part, characters = "", iter(text)
    for character in characters:
        if character == delimiter:
            yield part
            part = ""
        else:
            part += next(characters, "") if character == "\\" else character
    yield part


def fill(text: str, values: Mapping[str, str]) -> str:
    """Replaces the placeholders with a value; the others stay."""
    return Template(text).safe_substitute({**ALWAYS_FILLED, **values})


def placeholders(text: str) -> set[str]:
    return set(Template(text).get_identifiers())
