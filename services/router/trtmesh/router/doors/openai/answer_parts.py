"""The parts of an answer, as a parser finds them in the text: content, reasoning, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the reasoning before the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins."""

    index: int
    """Number of the call in the answer."""
    name: str
    id: str = ""
    """The id for the tool's answer."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More text of the JSON object with a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete."""

    index: int


AnswerPart = Content | Reasoning | CallBegun | CallArguments | CallEnded
"""Any part, in the order of the text."""
