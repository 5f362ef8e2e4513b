"""The patterns of PEFT configurations for the rank or alpha of some layers, matched in linear time.

PEFT takes any regular expression, and some take exponential time. Here a pattern has alternatives, separated by `|` at
the top level or in one group, of these tokens:

| token | matches |
|---|---|
| letters, digits, `_`, `-`, `\\.` | themselves |
| `.` | any character |
| `\\d`, `\\d+` | one digit, digits |
| `.*` | anything |
| `^` first, `$` last | the start, the end of the name |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trtmesh.chassis.errors import UnsupportedField

MOST_ALTERNATIVES = 2048
MOST_REPEATING = 64
"""Most alternatives with `.*` or `\\d+`."""
MOST_PATTERN_CHARACTERS = 1024
MOST_TOKENS = 128
"""Most tokens of an alternative."""

_REPEATING = frozenset({".*", r"\d+"})
_TOKEN = re.compile(r"\.\*|\\d\+|\\d|\\\.|[\w.^$-]")
_GROUP = re.compile(r"([^()|]*)\((?:\?:)?([^()]*)\)([^()|]*)")

Tokens = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Alternative:
    """Matches the end of a layer's name from a `.` or the start on."""

    tokens: Tokens
    is_anchored: bool
    """Whether the pattern matches whole names only."""
    value: float


@dataclass(frozen=True, slots=True)
class _Fixed(_Alternative):
    """Matches names of a given length, since the length tells the start of the match."""

    expression: re.Pattern[str]

    def matches(self, name: str) -> bool:
        start = len(name) - len(self.tokens)
        after_dot = start > 0 and not self.is_anchored and name[start - 1] == "."
        return (start == 0 or after_dot) and self.expression.fullmatch(name, start) is not None


class _Repeating(_Alternative):
    """Matches with `.*` or `\\d+`: bit i of a number stands for position i, and each token moves all positions."""

    __slots__ = ()

    def matches(self, name: str) -> bool:
        bits = _bits(name)
        digits = sum(each for character, each in bits.items() if character.isdecimal())
        everything = (1 << len(name)) - 1
        reached = 1 if self.is_anchored else 1 | bits.get(".", 0) << 1
        for token in self.tokens:
            match token:
                case ".*":
                    reached = (everything << 1 | 1) & -(reached & -reached)
                case r"\d+":
                    # The carry runs through the digits.
                    after = (reached & digits) << 1
                    reached = (((after & digits) + digits) ^ digits) | after
                case r"\d":
                    reached = (reached & digits) << 1
                case ".":
                    reached = (reached & everything) << 1
                case _:
                    reached = (reached & bits.get(token[-1], 0)) << 1
        return bool(reached >> len(name))


class LayerPatterns:
    """Values by pattern. The first match with the end of a layer's name counts, as in PEFT."""

    def __init__(self, field: str, values: Mapping[str, float]) -> None:
        """Raises UnsupportedField for a pattern outside the syntax, or too many."""
        self._field = field
        self._alternatives: list[_Fixed | _Repeating] = []
        repeating = 0
        for pattern, value in values.items():
            for each in self._parse(pattern, value):
                self._alternatives.append(each)
                repeating += isinstance(each, _Repeating)
                if len(self._alternatives) > MOST_ALTERNATIVES or repeating > MOST_REPEATING:
                    limit = f"at most {MOST_ALTERNATIVES}, {MOST_REPEATING} of them with .* or \\d+"
                    raise UnsupportedField(
                        "holds too many patterns", field=f"adapter_config.{field}", limit=limit
                    )

    def value(self, name: str, default: float) -> float:
        for each in self._alternatives:
            if each.matches(name):
                return each.value
        return default

    def _parse(self, pattern: str, value: float) -> Iterator[_Fixed | _Repeating]:
        if len(pattern) > MOST_PATTERN_CHARACTERS:
            raise self._refusal(pattern, f"at most {MOST_PATTERN_CHARACTERS} characters")
        for parts in _alternatives(pattern):
            tokens = tuple(token for part in parts for token in self._tokens(pattern, part))
            is_anchored = tokens[:1] == ("^",)
            tokens = tokens[is_anchored : -1 if tokens[-1:] == ("$",) else None]
            if not 0 < len(tokens) <= MOST_TOKENS or {"^", "$"} & set(tokens):
                limit = f"alternatives of 1 to {MOST_TOKENS} tokens, ^ first and $ last"
                raise self._refusal(pattern, limit)
            if _REPEATING & set(tokens):
                yield _Repeating(tokens, is_anchored, value)
            else:
                yield _Fixed(tokens, is_anchored, value, re.compile("".join(tokens)))

    def _tokens(self, pattern: str, part: str) -> list[str]:
        tokens = _TOKEN.findall(part)
        if "".join(tokens) != part:
            limit = r"names with . \. \d \d+ .* ^ $ and alternatives with |, at the top level or in one group"
            raise self._refusal(pattern, limit)
        return tokens

    def _refusal(self, pattern: str, limit: str) -> UnsupportedField:
        return UnsupportedField(
            "holds a pattern that is not supported",
            field=f"adapter_config.{self._field}",
            value=pattern[:200],
            limit=limit,
        )


def _alternatives(pattern: str) -> Iterator[tuple[str, ...]]:
    """Returns the alternatives, each as a list of tokens."""
    if found := _GROUP.fullmatch(pattern):
        head, group, tail = found.groups()
        return ((head, each, tail) for each in group.split("|"))
    return ((each,) for each in pattern.split("|"))


def _bits(name: str) -> dict[str, int]:
    """The positions of each character."""
    bits: dict[str, int] = {}
    for position, character in enumerate(name):
        bits[character] = bits.get(character, 0) | 1 << position
    return bits
