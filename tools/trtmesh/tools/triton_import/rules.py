"""Rules for values: the building blocks of the tables of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trtmesh.chassis.errors import SettingsError
from trtmesh.tools.triton_import.findings import Draft, Subject

Rule = Callable[[Subject, Draft], None]
"""Converts a value."""


TRUE = frozenset({"true", "t", "yes", "y", "1"})
FALSE = frozenset({"false", "f", "no", "n", "0"})

TORCH = ("engine", "torch")
MODELS = ("router", "triton", "models")


def whole(subject: Subject) -> int:
    return _number(subject, 0, "a whole number of at least 0")


def positive(subject: Subject) -> int:
    return _number(subject, 1, "a whole number of at least 1")


def _number(subject: Subject, least: int, limit: str) -> int:
    try:
        number = int(subject.value)
    except ValueError:
        raise wrong(subject, limit) from None
    if number < least:
        raise wrong(subject, limit)
    return number


def share(subject: Subject) -> float:
    """A number from 0 to 1."""
    try:
        number = float(subject.value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise wrong(subject, "a number from 0 to 1")
    return number


def truth(subject: Subject) -> bool:
    word = subject.value.strip().lower()
    if word not in TRUE | FALSE:
        raise wrong(subject, "true or false")
    return word in TRUE


def one_of(*same: str, **renamed: str) -> Callable[[Subject], str]:
    """Reads one of the words, most with the same meaning here."""
    words = {word: word for word in same} | renamed

    def read(subject: Subject) -> str:
        if subject.value not in words:
            raise wrong(subject, f"one of {', '.join(words)}")
        return words[subject.value]

    return read


def engine(name: str, read: Callable[[Subject], Any]) -> Rule:
    """A setting of the embedded engine."""

    def rule(subject: Subject, draft: Draft) -> None:
        draft.carry(subject, (*TORCH, *name.split(".")), read(subject))

    return rule


def own(name: str, read: Callable[[Subject], Any]) -> Rule:
    """A setting of the Triton model itself."""

    def rule(subject: Subject, draft: Draft) -> None:
        draft.carry(subject, (*MODELS, subject.model, name), read(subject))

    return rule


def replaced(text: str) -> Rule:
    def rule(subject: Subject, draft: Draft) -> None:
        draft.replace(subject, text)

    return rule


def unsupported(reason: str) -> Rule:
    def rule(subject: Subject, draft: Draft) -> None:
        draft.refuse(subject, reason)

    return rule


def only(read: Callable[[Subject], Any], *, value: Any, text: str, reason: str = "") -> Rule:
    """Accepts the value that always holds, with a text; refuses any other, with a reason or the same text."""

    def rule(subject: Subject, draft: Draft) -> None:
        if read(subject) == value:
            draft.replace(subject, text)
        else:
            draft.refuse(subject, reason or text)

    return rule


def wrong(subject: Subject, limit: str) -> SettingsError:
    return SettingsError(
        f"model '{subject.model}': {subject.what} is {subject.value!r} but must be {limit}"
    )
