"""What a model says in an answer, piece by piece: text, reasoning, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the thoughts before it."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins."""

    index: int
    """Its number in the answer."""
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of the JSON object with a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete."""

    index: int


Said = Content | Reasoning | CallBegun | CallArguments | CallEnded
