"""Checks the messages of workers and tokenizers like those of strangers. A peer that breaks the contract is left."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

from trtmesh.chassis.errors import Unavailable

MOST_NAME_CHARACTERS = 512
"""Longest name or fingerprint."""

FIRST_REST_SECONDS, LONGEST_REST_SECONDS = 5.0, 300.0
"""Rest of a peer after its first breach. Doubles with each further breach; a stream longer than the longest rest resets
it."""


class ContractBroken(Unavailable):
    """A peer sent a message against its contract."""


def check_names(**names: str) -> None:
    """Raises ContractBroken for a name that is too long."""
    for field, name in names.items():
        if len(name) > MOST_NAME_CHARACTERS:
            raise ContractBroken(
                f"its {field} has {len(name)} characters, more than {MOST_NAME_CHARACTERS}"
            )


def check_numbers(message: object, most: int, *fields: str) -> None:
    """Raises ContractBroken for a field, of two or more, that is negative, above `most` or not a number. Reads all at
    once: every worker reports ten times a second."""
    values = _reader(fields)(message)
    # A sum with what is not a number is none either.
    if min(values) >= 0 and max(values) <= most and sum(values) >= 0:
        return
    for field, value in zip(fields, values, strict=True):
        if not 0 <= value <= most:
            raise ContractBroken(f"its {field} is {value}, not 0 to {most}")


@cache
def _reader(fields: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    return attrgetter(*fields)
