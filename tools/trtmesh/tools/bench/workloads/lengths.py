"""Distributions of lengths, as options spell them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random

from trtmesh.chassis.errors import SettingsError

MOST_TOKENS = 2**20
"""Largest length: beyond every model's context."""

FORMS = "200, 100..300 (uniform), 200±50 (normal; also 200+-50) or lognormal:200±50"
_FORM = re.compile(
    r"(?:(lognormal:)(?=.*[±-]))?(\d{1,8})(?:(\.\.|±|\+-)(\d{1,8}))?",
)


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """A distribution of numbers of tokens."""

    kind: str
    """`uniform`, `normal` or `lognormal`."""
    one: int
    """The least length, or the mean of the lengths themselves."""
    other: int
    """The largest, or the deviation."""

    def draw(self, draw: Random) -> int:
        """Rounded; a length below one token is one, one beyond the largest is that."""
        if self.kind == "uniform":
            return draw.randint(self.one, self.other)
        if self.kind == "normal":
            drawn = draw.gauss(self.one, self.other)
        else:
            variance = math.log(1 + (self.other / self.one) ** 2)
            middle = math.log(self.one) - variance / 2
            drawn = draw.lognormvariate(middle, math.sqrt(variance))
        return min(max(1, round(drawn)), MOST_TOKENS)


def read_lengths(text: str, setting: str) -> TokenLengths:
    """Raises SettingsError for another form, no tokens or too many."""
    if (match := _FORM.fullmatch(text.replace(" ", ""))) is None:
        raise SettingsError(f"is {text!r} but must be like {FORMS}", setting=setting)
    lognormal, one, mark, other = match.groups()
    if mark in (None, ".."):
        lengths = TokenLengths("uniform", int(one), int(other or one))
        most = lengths.other
    else:
        lengths = TokenLengths("lognormal" if lognormal else "normal", int(one), int(other))
        most = lengths.one
    if not 1 <= lengths.one <= most <= MOST_TOKENS:
        raise SettingsError(
            f"is {text!r} but lengths must be 1 to {MOST_TOKENS} tokens, the smaller first",
            setting=setting,
        )
    return lengths
