"""Distributions of lengths, as options spell them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from random import Random
from typing import Protocol

from trtmesh.chassis.errors import SettingsError

MOST_TOKENS = 2**20
"""Largest length: beyond every model's context."""

FORMS = "200, 100..300 (uniform), 200±50 (normal; also 200+-50) or lognormal:200±50"
_WHOLE, _PLUS_MINUS = r"(\d{1,8})", r"(?:±|\+-)"


class TokenLengths(Protocol):
    """Draws a number of tokens, at least one."""

    def draw(self, draw: Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each length from `least` to `most`; a fixed length has both equal."""

    least: int
    most: int

    def draw(self, draw: Random) -> int:
        return draw.randint(self.least, self.most)


@dataclass(frozen=True, slots=True)
class Normal:
    """Rounded draws; those below one token are one, those beyond the largest length are that."""

    mean: int
    deviation: int

    def draw(self, draw: Random) -> int:
        return _bounded(draw.gauss(self.mean, self.deviation))


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Rounded draws, with the mean and the deviation of the lengths themselves."""

    mean: int
    deviation: int

    def draw(self, draw: Random) -> int:
        variance = math.log(1 + (self.deviation / self.mean) ** 2)
        middle = math.log(self.mean) - variance / 2
        return _bounded(draw.lognormvariate(middle, math.sqrt(variance)))


def _bounded(length: float) -> int:
    return min(max(1, round(length)), MOST_TOKENS)


def read_lengths(text: str, setting: str) -> TokenLengths:
    """Raises SettingsError for another form, no tokens or too many."""
    spelled = text.replace(" ", "")
    if match := re.fullmatch(_WHOLE, spelled):
        lengths: TokenLengths = Uniform(int(match[1]), int(match[1]))
        numbers = [int(match[1])]
    elif match := re.fullmatch(rf"{_WHOLE}\.\.{_WHOLE}", spelled):
        lengths = Uniform(int(match[1]), int(match[2]))
        numbers = [int(match[1]), int(match[2])]
    elif match := re.fullmatch(rf"(lognormal:)?{_WHOLE}{_PLUS_MINUS}{_WHOLE}", spelled):
        mean, deviation = int(match[2]), int(match[3])
        lengths = LogNormal(mean, deviation) if match[1] else Normal(mean, deviation)
        numbers = [mean]
    else:
        raise SettingsError(f"is {text!r} but must be like {FORMS}", setting=setting)
    if numbers != sorted(numbers) or not 1 <= numbers[0] <= numbers[-1] <= MOST_TOKENS:
        raise SettingsError(
            f"is {text!r} but lengths must be 1 to {MOST_TOKENS} tokens, the smaller first",
            setting=setting,
        )
    return lengths
