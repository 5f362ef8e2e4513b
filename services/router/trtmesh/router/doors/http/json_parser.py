"""JSON from strangers: counted while it is parsed, in steps of a millisecond.

The standard library's parser holds the interpreter for the whole text and counts nothing. Here it reads pieces: a run
of numbers, a piece of a string. Between pieces other threads run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.chassis.quoting import cut

MAX_DEPTH = 64
"""Deepest nesting of lists and objects."""
MAX_KEYS = 1024
"""Most keys of an object."""
MAX_VALUES = 2**16
"""Most keys, texts, lists, objects and single values together."""
MAX_NUMBERS = 2**20
"""Most numbers in lists."""
MAX_KEY_CHARACTERS = 1024
PIECE = 2**14
"""Characters of numbers or of a string that are read at once."""
SHOWN_CHARACTERS = 64

_SPACE = re.compile(r"[ \t\n\r]*+")
_WORD = re.compile(r"(?:null|true|false|NaN|-?Infinity)\b|-?[0-9][-+.0-9eE]*+")
_WORDS = {"null": None, "true": True, "false": False}
_NUMBERS = re.compile(r"[-+.0-9eE, \t\n\r]*+")
_STRING_PIECE = re.compile(
    r'(?:[^"\\]++|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}|\\[^u]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
"""Whole characters and escapes. Half of a surrogate pair is none: no encoder takes it."""

Repeated = Callable[[str], str]
"""Makes the sentence about a repeated key."""


class _Parser:
    """Reads one text from left to right."""

    def __init__(self, text: str, repeated: Repeated) -> None:
        self._text = text
        self._repeated = repeated
        self._values = 0
        self._numbers_read = 0
        self._depth = 0
        self._at = 0

    def whole(self) -> Any:
        value = self._value()
        if self._next_char():
            raise self._wrong("the end")
        return value

    def _value(self) -> Any:
        self._count()
        match self._next_char():
            case "{":
                return self._nested(self._object)
            case "[":
                return self._nested(self._list)
            case '"':
                return self._string()
            case _:
                return self._word()

    def _next_char(self) -> str:
        """The next character that is no space, or ''."""
        while True:
            space = _SPACE.match(self._text, self._at, self._at + PIECE)
            assert space is not None
            if space.end() == self._at:
                return self._text[self._at : self._at + 1]
            self._at = space.end()

    def _count(self) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            raise _refusal(f"it has more than {MAX_VALUES} values, numbers in lists apart")

    def _count_numbers(self, numbers: int) -> None:
        # A short run costs as much as any other value.
        self._count()
        self._numbers_read += numbers
        if self._numbers_read > MAX_NUMBERS:
            raise _refusal(
                f"it has more than {MAX_NUMBERS} numbers in lists; send large tensors as binary data"
            )

    def _nested(self, read: Callable[[], Any]) -> Any:
        if self._depth == MAX_DEPTH:
            raise _refusal(f"it is nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        self._at += 1
        value = read()
        self._depth -= 1
        return value

    def _object(self) -> dict[str, Any]:
        members: dict[str, Any] = {}
        if self._ends("}"):
            return members
        while True:
            if self._next_char() != '"':
                raise self._wrong("a key in quotes")
            key = self._string()
            if key in members:
                raise InvalidRequest(self._repeated(cut(key)))
            if len(members) == MAX_KEYS or len(key) > MAX_KEY_CHARACTERS:
                raise _refusal(
                    f"an object has more than {MAX_KEYS} keys, or a key more than {MAX_KEY_CHARACTERS} characters:"
                    f" {cut(key, SHOWN_CHARACTERS)!r}"
                )
            self._count()
            if self._next_char() != ":":
                raise self._wrong("':'")
            self._at += 1
            members[key] = self._value()
            if self._ends("}"):
                return members
            self._separate("'}'")

    def _list(self) -> list[Any]:
        elements: list[Any] = []
        if self._ends("]"):
            return elements
        while True:
            self._numbers(elements)
            elements.append(self._value())
            if self._ends("]"):
                return elements
            self._separate("']'")

    def _ends(self, bracket: str) -> bool:
        ends = self._next_char() == bracket
        self._at += ends
        return ends

    def _separate(self, bracket: str) -> None:
        if self._next_char() != ",":
            raise self._wrong(f"',' or {bracket}")
        self._at += 1

    def _numbers(self, elements: list[Any]) -> None:
        """Reads numbers that another element follows, in pieces."""
        while True:
            run = _NUMBERS.match(self._text, self._at, self._at + PIECE)
            assert run is not None
            numbers, comma, _ = run.group().rpartition(",")
            if not comma:
                return
            self._count_numbers(numbers.count(",") + 1)
            try:
                # An empty list would hide a comma without a number.
                elements += json.loads(f"[{numbers}]") or self._missing()
            except ValueError as error:
                raise self._wrong("numbers", str(error)) from error
            self._at += len(numbers) + 1

    def _missing(self) -> list[Any]:
        raise self._wrong("a value")

    def _string(self) -> str:
        self._at += 1
        pieces: list[str] = []
        while True:
            found = _STRING_PIECE.match(self._text, self._at, self._at + PIECE)
            assert found is not None
            if piece := found.group():
                try:
                    pieces.append(json.loads(f'"{piece}"'))
                except ValueError as error:
                    raise self._wrong("a string", str(error)) from error
                self._at = found.end()
            if self._text.startswith('"', self._at):
                self._at += 1
                return "".join(pieces)
            if not piece:
                raise self._wrong("the end of a string, or a whole character")

    def _word(self) -> Any:
        word = _WORD.match(self._text, self._at, self._at + PIECE)
        if word is None:
            raise self._wrong("a value")
        text = word.group()
        if len(text) == PIECE:
            raise self._wrong(f"a number of fewer than {PIECE} characters")
        self._at = word.end()
        if text in _WORDS:
            return _WORDS[text]
        try:
            return json.loads(text)
        except ValueError as error:
            self._at = word.start()
            raise self._wrong("a number", str(error)) from error

    def _wrong(self, expected: str, why: str = "") -> InvalidRequest:
        got = self._text[self._at : self._at + SHOWN_CHARACTERS // 4]
        more = f": {cut(why, SHOWN_CHARACTERS)}" if why else ""
        return _refusal(f"at character {self._at} it should have {expected} but has {got!r}{more}")


def _refusal(problem: str) -> InvalidRequest:
    return InvalidRequest(f"failed to parse the request JSON buffer: {problem}")


def parse(body: bytes | memoryview, repeated: Repeated) -> Any:
    """A JSON text in UTF-8. Raises InvalidRequest for anything else, and beyond the limits."""
    try:
        text = str(body, "utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refusal(f"it is not UTF-8 at byte {error.start}") from error
    return _Parser(text, repeated).whole()
