"""The limits of a JSON schema, and the place of a problem in a schema."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from trtmesh.chassis.errors import InvalidField
from trtmesh.chassis.json_text import load_json
from trtmesh.engine.guides import FIELD

MOST_DEPTH = 64
MOST_ENUM_VALUES = 5_000
MOST_PROPERTIES = 500
"""Per object: the time to compile properties grows with the square of the number, to seconds for 2,000."""
UNWRITABLE = re.compile(r"(?<!\\)(?:\\\\)*(\\u00[01][0-9a-f]|\x7f)")
"""Matches a character in JSON that has no escape of one letter."""
MOST_SECONDS = 0.1
"""Time of the trials for the place of a problem."""

LONG = {"pattern", "patternProperties", "format", "multipleOf"}
"""Keywords with which the library may take long within its limits, to find what several expressions have in common, or
which remainders lead to a multiple: ten expressions take microseconds, and thirty take minutes."""

Schema = dict[str, Any]


def read_schema(text: str, base: str = "") -> Schema:
    """Parses a schema and checks its size. Raises InvalidField with the path of the problem below `base`."""
    try:
        schema = load_json(text)
    except json.JSONDecodeError as error:
        raise InvalidField(f"is not JSON: {error}", field=FIELD) from None
    if not isinstance(schema, dict):
        raise InvalidField("must be a JSON object", field=FIELD)
    if "x-guidance" in schema:
        refuse(
            f"{base}/x-guidance", "is not taken; guided_decoding.max_whitespace bounds white space"
        )
    values = 0
    for below, part in parts_of(schema):
        path = base + below
        if below.count("/") > MOST_DEPTH:
            refuse(path, f"is nested deeper than {MOST_DEPTH} levels")
        if isinstance(part.get("enum"), list):
            values += len(part["enum"])
            if values > MOST_ENUM_VALUES:
                refuse(f"{path}/enum", f"brings the values of enums above {MOST_ENUM_VALUES}")
        properties = part.get("properties")
        if isinstance(properties, dict) and len(properties) > MOST_PROPERTIES:
            refuse(f"{path}/properties", f"has more than {MOST_PROPERTIES} properties")
        least, required = part.get("minProperties"), part.get("required")
        if isinstance(least, int):
            others = least - len({*map(str, required)} if isinstance(required, list) else ())
            if others > 1:
                # A grammar counts members, of which two may have the same name.
                problem = f"asks for {others} properties beside those required, of at most 1"
                refuse(f"{path}/minProperties", problem)
        for key in ("const", "enum"):
            if key in part and (
                found := UNWRITABLE.search(json.dumps(part[key], ensure_ascii=False))
            ):
                code = ord(json.loads(f'"{found[1]}"'))
                refuse(f"{path}/{key}", f"has the character U+{code:04X}, which no answer can have")
    return schema


def may_take_long(schema: Schema) -> bool:
    """Whether a process must compile the schema first."""
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            if not LONG.isdisjoint(part):
                return True
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return False


def refuse(path: str, problem: str) -> NoReturn:
    """Raises InvalidField."""
    raise InvalidField(f"at {path or '/'} {problem}", field=FIELD)


def parts_of(value: Any) -> Iterator[tuple[str, Schema]]:
    """All JSON objects within a value, outer before inner, by path."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        path, part = waiting.pop()
        if isinstance(part, dict):
            yield path, part
            children = [(f"{path}/{_escaped(key)}", child) for key, child in part.items()]
        elif isinstance(part, list):
            children = [(f"{path}/{index}", child) for index, child in enumerate(part)]
        else:
            continue
        waiting += reversed(children)


def place_of(problem: str, schema: Schema, problem_of: Callable[[Schema], str]) -> str:
    """The path of the smallest part with the problem of the whole, as far as quick trials by `problem_of` show."""
    found = ""
    definitions = {
        key: schema[key]
        for key in ("$defs", "definitions")
        if key in schema and not may_take_long(schema[key])
    }
    last = time.monotonic() + MOST_SECONDS
    for path, part in parts_of(schema):
        if time.monotonic() > last:
            break
        if not path.startswith(f"{found}/") or may_take_long(part):
            continue
        if problem_of(definitions | part) == problem:
            found = path
    return found or "/"


def _escaped(key: str) -> str:
    """As in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")
