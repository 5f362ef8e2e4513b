"""The program that reads answers by the response template of a model, which has expressions of strangers.

transformers' parser reads them. The place between two texts of an answer is a small state, and any process can continue
there, since answers are long and tokenizers may be lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import chain
from typing import Any, BinaryIO

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)
from trtmesh.tokenizer.chat.frames import DONE, MOST_PROBLEM_CHARACTERS, REFUSED, serve

CONTENT, CALL = "content", "tool_calls"
REASONING = ("reasoning_content", "reasoning", "thinking")
BEFORE = 64
"""Characters before the place that expressions may look back at."""

Part = tuple[str, ...]
"""`content` or `reasoning` with a text, or `call` with name, arguments and id."""


@dataclass(slots=True)
class Place:
    before: str = ""
    rest: str = ""
    """The text that may begin a marker."""
    field: str | None = None
    """The field of the text here; None where the template leaves it out."""
    captures: Mapping[str, str] | None = None
    body: str = ""
    """The text of the field so far, of fields that are no plain text."""
    is_open: bool = False
    marker: str = ""
    """What began the field."""
    space: str = ""
    """White space, left out if the field ends behind it."""
    has_text: bool = False
    """Whether the field has said any text."""
    said: tuple[str, ...] = ()
    """Kinds of text that the answer has."""


class AnswerReader(ResponseParser):
    """transformers' parser, from any place on, with parts of the answer in place of events.

    A field that is not as its template says, such as a call with a mistake in its JSON, is content with its markers.
    White space around texts is left out where the template strips it. Further fields of one kind of text go on with it,
    where transformers would keep the last alone.
    """

    def __init__(self, template: ResponseTemplate, place: Place, tools: Any) -> None:
        super().__init__(template, prefix="", tools=tools)
        self.parts: list[Part] = []
        self._buffer, self._pos = place.before + place.rest, len(place.before)
        if place.captures is not None:
            self._current, self._captures = place.field, dict(place.captures)
            self._body, self._opened = place.body, place.is_open
        self._place = place
        self._told_to = self._pos
        """Where the text of the field ends in the buffer."""

    def read(self, text: str, *, is_end: bool) -> Place:
        """Takes more text. Returns the place behind it."""
        self._buffer += text
        self._process([], is_end)
        place, begin = self._place, max(0, self._pos - BEFORE)
        place.before, place.rest = self._buffer[begin : self._pos], self._buffer[self._pos :]
        place.field, place.captures = self._current, self._captures
        place.body, place.is_open = self._body, self._opened
        if self._kind() and place.captures == {}:
            place.body = ""
        return place

    def _kind(self) -> str | None:
        """The kind of plain text that the field is, or None for other fields."""
        if self._current is None or self._current == CALL:
            return None
        field = self._spec.fields[self._current]
        kind = "reasoning" if self._current in REASONING else CONTENT
        return kind if field.content == "text" and field.transform is None else None

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        super()._accumulate(events, text)
        self._told_to = self._pos + len(text)
        if kind := self._kind():
            self._say(kind, text, self._spec.fields[str(self._current)])

    def _say(self, kind: str, text: str, field: ResponseTemplateField) -> None:
        """Says more text of a field, but for white space that may be its end."""
        place = self._place
        if not field.content_args.get("strip", True):
            place.has_text = True
            self.parts.append((kind, text))
            return
        if not (stripped := text.strip()):
            place.space += text
            return
        lead = place.space + text[: len(text) - len(text.lstrip())]
        if not place.has_text:
            lead = (field.join or "\n") if kind in place.said else ""
        place.said, place.has_text = (*{*place.said, kind},), True
        place.space = text[len(text.rstrip()) :]
        self.parts.append((kind, lead + stripped))

    def _open_explicit(
        self, events: list[dict[str, Any]], field: ResponseTemplateField, m: Any
    ) -> None:
        super()._open_explicit(events, field, m)
        self._place.marker, self._told_to = m.group(), m.end()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name, was_open, body = self._current, self._opened, self._body
        kind, place = self._kind(), self._place
        closing = self._buffer[self._told_to : self._pos] if name != self._implicit_name else ""
        try:
            super()._close_current(events)
            if was_open and kind is None:
                self.parts += _parts_of(str(name), events[-1]["value"])
        except (ValueError, TypeError, KeyError, RecursionError):
            if kind is None:
                self.parts.append((CONTENT, place.marker + body + closing))
            self._reset_to_implicit()
        place.marker, place.space, place.has_text = "", "", False


def _parts_of(name: str, value: Any) -> list[Part]:
    """The parts of a field with a value. Raises ValueError, TypeError or KeyError for what is no call, or no text."""
    if name == CALL:
        parts = [_call_of(each) for each in (value if isinstance(value, list) else [value])]
    else:
        parts = [(CONTENT, value if isinstance(value, str) else _json(value))]
    # Halves of surrogate pairs have no place in an answer.
    "".join(chain.from_iterable(parts)).encode()
    return parts


def _call_of(call: Any) -> Part:
    function = call["function"]
    name, arguments, own = function["name"], function.get("arguments", {}), call.get("id")
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("this is no call")
    return "call", name, _json(arguments), own if isinstance(own, str) else ""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _place_behind(template: ResponseTemplate, prompt_end: str) -> Place:
    """The place behind a prompt, which may have begun the answer."""
    if template.start_anchor_re.search(prompt_end) is None:
        return Place()
    begun = template.truncate_past_last_anchor(prompt_end)
    place = AnswerReader(template, Place(), None).read(begun, is_end=False)
    place.space, place.said = "", ()
    return place


@lru_cache(maxsize=64)
def _tools(text: str) -> Any:
    return json.loads(text) if text else None


def _begin(first: bytes) -> Callable[[bytes, BinaryIO], bytes]:
    try:
        return partial(_answer, load_response_template(json.loads(first)))
    except Exception as error:  # noqa: BLE001 - a template of strangers
        problem = REFUSED + _problem_of(error)
        return lambda _, __: problem


def _answer(template: ResponseTemplate, question: bytes, _: BinaryIO) -> bytes:
    asked = json.loads(question)
    try:
        state = asked["state"]
        place = (
            Place(**json.loads(state)) if state else _place_behind(template, asked["prompt_end"])
        )
        reader = AnswerReader(template, place, _tools(asked["tools"]))
        place = reader.read(asked["text"], is_end=asked["is_end"])
    except Exception as error:  # noqa: BLE001 - a template of strangers
        return REFUSED + _problem_of(error)
    told = {"parts": reader.parts, "state": json.dumps(asdict(place))}
    return DONE + json.dumps(told).encode()


def _problem_of(error: Exception) -> bytes:
    told = f"{type(error).__name__}: {error}"[:MOST_PROBLEM_CHARACTERS]
    return told.encode("utf-8", "replace")


if __name__ == "__main__":
    serve(_begin)
