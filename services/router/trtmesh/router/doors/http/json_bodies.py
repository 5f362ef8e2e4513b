"""JSON from strangers: counted in pieces, then parsed in one go.

orjson holds the interpreter for a whole text: 20 to 50 ms for a million numbers, half a second for 16 MiB of empty
objects. So values are counted before, by regular expressions, a piece at a time.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8 as BOM
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.quoting import cut

MAX_DEPTH = 64
"""Deepest nesting of lists and objects."""
MAX_KEYS = 1024
"""Most keys of an object."""
MAX_VALUES = 2**16
"""Most texts, keys, lists and objects together."""
MAX_NUMBERS = 2**20
"""Most other values, such as numbers."""
MAX_KEY_CHARACTERS = 1024
SHOWN_CHARACTERS = 64
PIECE = 2**16
"""Bytes that are counted at once."""
JSON_COST = 16
"""Bytes of a protobuf message that take as long as a byte of JSON."""

_OUTSIDE = re.compile(rb'[^"]*+')
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_TOKENS = re.compile(rb'[{}:]|"(?:[^"\\]++|\\.)*+"')
"""Braces, colons and texts."""

Repeated = Callable[[str], str]
"""Makes the sentence about a repeated key."""


def _repeated(key: str) -> str:
    return f"failed to parse the request JSON buffer: key '{key}' already exists in its object"


def parse_json(
    body: bytes | memoryview, most_bytes: int, repeated: Repeated = _repeated
) -> dict[str, Any]:
    """Returns a JSON object. Raises InvalidRequest."""
    if len(body) > most_bytes:
        raise InvalidRequest(
            f"the request JSON has {len(body)} bytes but must have at most {most_bytes}; send"
            " large tensors as binary data"
        )
    if body[: len(BOM)] == BOM:
        body = body[len(BOM) :]
    counts = _count(body)
    parsed = _loaded(body)
    if not isinstance(parsed, dict):
        raise _refusal("it is not a JSON object")
    if _check_containers(parsed, counts.containers) != counts.members:
        # orjson keeps the last of several values.
        raise InvalidRequest(repeated(cut(_repeated_key(body))))
    return parsed


def parse_text(text: str) -> Any:
    """Returns the value of a text of JSON within a body, with the limits of bodies. Raises InvalidRequest."""
    body = text.encode()
    counts = _count(body)
    parsed = _loaded(body)
    _check_containers([parsed], counts.containers + 1)
    return parsed


def _loaded(body: bytes | memoryview) -> Any:
    problem = ""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        problem = f"{error.msg}: line {error.lineno} column {error.colno}"
    # Not above: that error has the whole text.
    raise _refusal(problem)


@dataclass(slots=True)
class _Counts:
    """What a text contains."""

    containers: int = 0
    """Lists and objects."""
    members: int = 0
    """Keys with their values."""
    texts: int = 0
    commas: int = 0

    def add(self, outside: bytes) -> None:
        """Counts a piece outside of texts. Raises InvalidRequest beyond a limit."""
        self.containers += outside.count(b"[") + outside.count(b"{")
        self.members += outside.count(b":")
        self.commas += outside.count(b",")
        if self.texts + self.containers > MAX_VALUES:
            raise _refusal(f"it has more than {MAX_VALUES} values, numbers in lists apart")
        if self.commas > MAX_NUMBERS:
            raise _refusal(
                f"it has more than {MAX_NUMBERS} numbers in lists; send large tensors as binary data"
            )


def _count(body: bytes | memoryview) -> _Counts:
    """Raises InvalidRequest beyond a limit. Passes over malformed text: the parser reports the error."""
    counts, at, end, is_outside = _Counts(), 0, len(body), True
    while at < end:
        piece = (_OUTSIDE if is_outside else _INSIDE).match(body, at, at + PIECE)
        assert piece is not None
        if is_outside:
            counts.add(bytes(piece[0]))
        at = piece.end()
        if at < end and body[at] == ord('"'):
            at += 1
            counts.texts += is_outside
            is_outside = not is_outside
        elif piece.end() == piece.start():
            # A backslash at the end of a piece begins the next one; one at the end of the body begins nothing.
            break
    return counts


def _check_containers(parsed: Any, containers: int) -> int:
    """Returns the number of keys in a value with so many lists and objects. Raises InvalidRequest beyond a limit."""
    level, keys, seen = [parsed], 0, 0
    for _ in range(MAX_DEPTH):
        seen += len(level)
        for each in level:
            if isinstance(each, dict):
                keys += len(each)
                _check_keys(each)
        # The elements of the last lists need no look.
        if seen >= containers:
            return keys
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return keys
    raise _refusal(f"it is nested deeper than {MAX_DEPTH} levels")


def _check_keys(members: dict[str, Any]) -> None:
    longest = max(members, key=len, default="")
    if len(members) > MAX_KEYS or len(longest) > MAX_KEY_CHARACTERS:
        raise _refusal(
            f"an object has more than {MAX_KEYS} keys, or a key more than {MAX_KEY_CHARACTERS} characters:"
            f" {cut(longest, SHOWN_CHARACTERS)!r}"
        )


def _repeated_key(body: bytes | memoryview) -> str:
    """Returns the first key that stands twice in an object of well-formed JSON."""
    objects, text = list[set[str]](), ""
    for token in map(bytes, (match[0] for match in _TOKENS.finditer(body))):
        if token == b"{":
            objects.append(set())
        elif token == b"}":
            objects.pop()
        elif token != b":":
            text = orjson.loads(token)
        elif text in objects[-1]:
            break
        else:
            objects[-1].add(text)
    return text


def _refusal(problem: str) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request JSON buffer: {problem}")
