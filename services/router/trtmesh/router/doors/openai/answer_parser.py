"""Separates the text, the reasoning and the tool calls of an answer as the answer arrives.

The parts do not depend on the cuts between pieces of text: a decision waits until no further text can change the
result. No text is lost: a marker without a valid call is content, with the surrounding text. With one exception: if a
grammar began a call, and the answer is cut off within the name of the call, this beginning is dropped. White space
around a marker belongs to the marker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trtmesh.chassis.json_text import load_json
from trtmesh.router.doors.openai.answer_parts import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Reasoning,
)
from trtmesh.router.doors.openai.call_formats import CallFormat

THINK, THOUGHT = "<think>", "</think>"
NOT_SPACE = re.compile(r"\S")
SIGN = re.compile(r'["\\{}\[\]]')
"""Characters of JSON relevant for the end of a value."""
NAMED = re.compile(r"([\w.:/-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")
"""A call without JSON around, up to the arguments."""
MOST_NAMED = 256
"""Most characters of such a call before the arguments."""

T = TypeVar("T")
Need = Generator[None, None, T]
"""A step of the parser: yields for more text, and returns the result."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read an answer."""

    reasons: bool = False
    """Whether the answer may begin with reasoning."""
    is_thinking: bool = False
    """Whether the prompt has begun the reasoning."""
    formats: Sequence[CallFormat] = ()
    """The formats of calls; none for an answer without calls."""
    tools: frozenset[str] = frozenset()
    """Names of the tools."""
    is_guided: bool = False
    """Whether a grammar keeps calls in the first format. Their arguments are then passed on while they come."""
    must_call: bool = False
    """Whether the grammar allows calls alone."""


class AnswerParser:
    def __init__(self, reading: Reading, new_id: Callable[[int], str] = lambda _: "") -> None:
        """`new_id` names calls by their number."""
        self._reading, self._new_id = reading, new_id
        self._text = ""
        """Text without a part so far."""
        self._has_ended = False
        self._said: list[AnswerPart] = []
        self._calls = 0
        self._refused = 0
        """End of the last JSON value without a call."""
        self._steps = self._answer()

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._calls

    def feed(self, text: str) -> Sequence[AnswerPart]:
        """Takes more text. Returns the parts now certain."""
        self._text += text
        next(self._steps)
        said, self._said = self._said, []
        return said

    def end(self) -> Sequence[AnswerPart]:
        """Takes the end of the text. Returns the last parts."""
        self._has_ended = True
        for _ in self._steps:
            pass
        return self._said

    def _say(self, said: AnswerPart) -> None:
        self._said.append(said)

    def _say_text(self, kind: type[Content | Reasoning], end: int) -> None:
        """Makes a part of the text up to a place, and drops the text."""
        if text := self._text[:end]:
            self._say(kind(text))
            self._text = self._text[end:]

    def _answer(self) -> Need[None]:
        reading = self._reading
        if reading.reasons:
            yield from self._reasoning()
        if reading.formats and reading.formats[0].may_lack_marker and not reading.is_guided:
            start = yield from self._space(0)
            if not (yield from self._run(reading.formats[0], start, must_be_known=True)):
                self._say_text(Content, self._refused)
        markers = {each.trigger if reading.is_guided else each.marker for each in reading.formats}
        ends = reading.formats[0].ends if reading.formats else ()
        while (found := (yield from self._text_until(Content, *markers, *ends))) is not None:
            start, marker = found
            if marker in ends:
                self._say_text(Content, start)
                self._text = self._text[len(marker) :]
                continue
            behind = start if reading.is_guided else start + len(marker)
            for each in reading.formats[:1] if reading.is_guided else reading.formats:
                if (yield from self._run(each, behind)):
                    break
            else:
                if self._is_cut_off(self._text[start:]):
                    self._text = ""
                    continue
                # Not to be searched again: an answer might have a marker in every place.
                self._say_text(Content, max(start + len(marker), self._refused))

    def _is_cut_off(self, text: str) -> bool:
        """Returns whether the answer ends within the beginning of a call by a grammar. Such a beginning is not
        content."""
        form = self._reading.formats[0]
        heads = (form.opening + form.head(name) for name in self._reading.tools)
        is_cut_off = any(head.startswith(text) for head in heads)
        return self._has_ended and self._reading.is_guided and is_cut_off

    def _reasoning(self) -> Need[None]:
        start = yield from self._space(0)
        if (yield from self._has(start, THINK)):
            start += len(THINK)
        elif not self._reading.is_thinking:
            return
        yield from self._drop_space(start)
        if (found := (yield from self._text_until(Reasoning, THOUGHT))) is not None:
            start, marker = found
            yield from self._drop_space(start + len(marker))

    def _text_until(
        self, kind: type[Content | Reasoning], *markers: str
    ) -> Need[tuple[int, str] | None]:
        """Makes parts of the text up to the first of the markers. Returns the place of the marker and the marker, or
        None at the end of the text. No marker may begin within another."""
        while True:
            places = ((self._text.find(marker), marker) for marker in markers)
            if found := min((each for each in places if each[0] >= 0), default=None):
                start, marker = found
                kept = len(self._text[:start].rstrip())
                self._say_text(kind, kept)
                return start - kept, marker
            if self._has_ended:
                if not (self._reading.must_call and self._is_cut_off(self._text.strip())):
                    self._say_text(kind, len(self._text))
                return None
            start = min(self._partial(marker) for marker in markers) if markers else len(self._text)
            self._say_text(kind, len(self._text[:start].rstrip()))
            yield

    def _partial(self, marker: str) -> int:
        """Returns the beginning of a marker at the end of the text, else the end."""
        size = len(self._text)
        starts = range(max(0, size - len(marker) + 1), size)
        return next((at for at in starts if marker.startswith(self._text[at:])), size)

    def _run(self, form: CallFormat, start: int, *, must_be_known: bool = False) -> Need[bool]:
        """Reads the calls at a place, and drops the text of the calls. Returns whether there is one."""
        at, self._refused = start, 0
        if self._reading.is_guided:
            at += len(form.opening) if (yield from self._has(at, form.opening)) else 0
        else:
            at = yield from self._space(at)
            if form.bracket:
                if not (yield from self._has(at, form.bracket)):
                    return False
                at = yield from self._space(at + len(form.bracket))
        has_call = False
        while (end := (yield from self._call(form, at, must_be_known=must_be_known))) is not None:
            has_call = True
            self._text = self._text[end:]
            at = yield from self._space(0)
            separator = form.separator.strip()
            if not separator or not (yield from self._has(at, separator)):
                break
            at = yield from self._space(at + len(separator))
        if has_call:
            yield from self._drop_closing(form)
        return has_call

    def _drop_closing(self, form: CallFormat) -> Need[None]:
        """Drops the end of a list of calls, as far as received."""
        at = yield from self._space(0)
        closing = form.closing.strip()
        if closing and (yield from self._has(at, closing)):
            at += len(closing)
        elif self._has_ended and closing.startswith(self._text[at:]):
            at = len(self._text)
        elif at < len(self._text) and form.separator:
            # The rest of the list is no call.
            self._say_text(Content, self._refused)
            if not (self._reading.is_guided and self._has_ended):
                return
            at = len(self._text)
        yield from self._drop_space(at)

    def _call(self, form: CallFormat, at: int, *, must_be_known: bool) -> Need[int | None]:
        """Makes parts of the call at a place. Returns the end of the call, or None, without parts, for other text."""
        if self._reading.is_guided:
            for name in self._reading.tools:
                if (yield from self._has(at, head := form.head(name))):
                    return (yield from self._guided_call(form, name, at + len(head)))
            return None
        if not form.key:
            return (yield from self._named_call(at))
        end = yield from self._value_end(at)
        call = None if end is None else _call_of(self._text[at:end])
        if call is None or (must_be_known and call[0] not in self._reading.tools):
            self._refused = end or self._refused
            return None
        self._say_call(*call)
        return end

    def _named_call(self, at: int) -> Need[int | None]:
        most = at + MOST_NAMED
        while (start := self._text.find("{", at, most)) < 0:
            if self._has_ended or len(self._text) >= most:
                return None
            yield
        named = NAMED.fullmatch(self._text, at, start)
        end = None if named is None else (yield from self._value_end(start))
        arguments = None if end is None else _arguments_of(_loaded(self._text[start:end]))
        if named is None or arguments is None:
            self._refused = end or self._refused
            return None
        self._say_call(named[1], arguments)
        return end

    def _say_call(self, name: str, arguments: str) -> None:
        index = self._begin_call(name)
        self._say(CallArguments(index, arguments))
        self._say(CallEnded(index))

    def _begin_call(self, name: str) -> int:
        index = self._calls
        self._calls += 1
        self._say(CallBegun(index, name, self._new_id(index)))
        return index

    def _guided_call(self, form: CallFormat, name: str, start: int) -> Need[int]:
        """Makes parts of a call as the arguments arrive. Incomplete arguments are passed on unchanged."""
        index = self._begin_call(name)
        end = yield from self._value_end(start, index)
        if end is None:
            return len(self._text)
        self._say(CallEnded(index))
        at = yield from self._space(end)
        return at + len(form.tail) if (yield from self._has(at, form.tail)) else at

    def _value_end(self, at: int, told_as: int | None = None) -> Need[int | None]:
        """Returns the end of the JSON object at a place, or None without a complete object. With `told_as`, the number
        of a call, passes the object on as arguments as the text arrives."""
        if not (yield from self._has(at, "{")):
            return None
        depth, is_quoted, told = 0, False, at
        while True:
            sign = SIGN.search(self._text, at)
            if sign is None:
                at = max(at, len(self._text))
            else:
                at = sign.end()
                if sign[0] == "\\":
                    at += 1
                elif sign[0] == '"':
                    is_quoted = not is_quoted
                elif not is_quoted:
                    depth += 1 if sign[0] in "{[" else -1
            if (
                (sign is None or not depth)
                and told_as is not None
                and (text := self._text[told:at])
            ):
                self._say(CallArguments(told_as, text))
                told += len(text)
            if sign is not None and not depth:
                return at
            if sign is None:
                if self._has_ended:
                    self._refused = len(self._text)
                    return None
                yield

    def _space(self, at: int) -> Need[int]:
        """Returns the next place from `at` on without white space, or the end of the text."""
        while (found := NOT_SPACE.search(self._text, at)) is None:
            at = len(self._text)
            if self._has_ended:
                return at
            yield
        return found.start()

    def _drop_space(self, at: int) -> Need[None]:
        """Drops the text up to a place, and the following white space."""
        at = yield from self._space(at)
        self._text = self._text[at:]

    def _has(self, at: int, text: str) -> Need[bool]:
        """Returns whether a text stands at a place."""
        while not self._has_ended and len(self._text) < at + len(text):
            if not text.startswith(self._text[at:]):
                return False
            yield
        return self._text.startswith(text, at)


def _call_of(text: str) -> tuple[str, str] | None:
    call = _loaded(text)
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), _arguments_of(call.get("arguments", call.get("parameters")))
    if not isinstance(name, str) or arguments is None or not _is_text(name):
        return None
    return name, arguments


def _arguments_of(given: Any) -> str | None:
    """Returns arguments as the text of a JSON object, or None if they are no object."""
    if isinstance(given, str):
        given = _loaded(given)
    if not isinstance(given, Mapping):
        return None
    try:
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except ValueError:
        # Numbers beyond JSON.
        return None
    return text if _is_text(text) else None


def _is_text(found: str) -> bool:
    """Whether it can be sent: JSON's escapes may be halves of surrogate pairs."""
    try:
        found.encode()
    except UnicodeEncodeError:
        return False
    return True


def _loaded(text: str) -> Any:
    """Returns the value of a JSON text, or None for other text."""
    try:
        return load_json(text)
    except ValueError:
        return None
