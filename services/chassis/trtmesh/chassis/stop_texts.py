"""Finds stop texts in a text given piece by piece, with the automaton of Aho and Corasick.

A state is the longest suffix of the text equal to a prefix of a stop text. The average cost of a character does not
depend on the number and length of the stop texts.

Special tokens omitted from a text count too: for a stop text with special tokens, the automaton also has a variant with
a mark in place of each token. No text contains the characters used as marks. The caller shows the automaton the mark of
each omitted token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trtmesh.chassis.panics import is_failure

_ROOT = 0
_FIRST_MARK, _LAST_MARK = 0xD800, 0xDFFF
"""Surrogates: no decoded text contains them."""
_MARKS = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens omitted from texts, by their spelling in texts with special tokens."""

    ids: Mapping[str, int]
    _named: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        longest_first = sorted(self.ids, key=len, reverse=True)
        named = "|".join(map(re.escape, longest_first)) or r"(?!)"
        object.__setattr__(self, "_named", re.compile(named))

    @classmethod
    def of(cls, tokenizer: Any) -> SpecialTokens:
        """Returns the omitted tokens of a tokenizer of the library `tokenizers`."""
        ids: dict[str, int] = {}
        for token in tokenizer.get_added_tokens_decoder().values():
            if token.special and token.content:
                token_id = ids[token.content] = tokenizer.token_to_id(token.content)
                # Some decoders put a space before the token.
                if _decode(tokenizer, [token_id] * 2).endswith(f" {token.content}"):
                    ids.setdefault(f" {token.content}", token_id)
        return cls(ids)

    def marked(self, text: str, marks: dict[int, str]) -> str:
        """Returns the text with marks in place of special tokens. Adds new marks to `marks`."""

        def mark(named: re.Match[str]) -> str:
            free = chr(min(_FIRST_MARK + len(marks), _LAST_MARK))
            return marks.setdefault(self.ids[named[0]], free)

        return self._named.sub(mark, text)


NO_SPECIAL_TOKENS = SpecialTokens({})


def _decode(tokenizer: Any, token_ids: list[int]) -> str:
    """'' where the library panics."""
    try:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))
    except BaseException as error:
        if not is_failure(error):
            raise
        return ""


def without_marks(text: str) -> str:
    return text if text.isascii() else _MARKS.sub("", text)


@dataclass(frozen=True, slots=True)
class Ending:
    """A stop text recognized in a state. `length` counts marks as characters."""

    stop_index: int
    length: int


class StopTexts:
    """The automaton of non-empty stop texts, shared by any number of sequences."""

    ROOT = _ROOT
    """The state before a text."""

    def __init__(self, texts: Sequence[str], omitted: SpecialTokens = NO_SPECIAL_TOKENS) -> None:
        self.texts = texts
        self.marks: dict[int, str] = {}
        """The marks of special tokens in stop texts, by id."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        # The text of a state is the first `depth` characters of this stop text.
        self._owner = [""]
        self._ending: list[Ending | None] = [None]
        for stop_index, spelling in spellings(texts, omitted, self.marks):
            self._add(stop_index, spelling)
        self._fallback = [_ROOT] * len(self._depth)
        self._link()
        first_characters = "".join(map(re.escape, self._next[_ROOT]))
        self._first_character = re.compile(f"[{first_characters}]")

    def find_start(self, text: str) -> int:
        """Position of the first possible start of a stop text, else the length of `text`."""
        match = self._first_character.search(text)
        return match.start() if match else len(text)

    def step(self, state: int, character: str) -> int:
        """Returns the state after another character."""
        while (following := self._next[state].get(character)) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return following

    def ending(self, state: int) -> Ending | None:
        """The longest stop text recognized in `state`; the first of equal texts."""
        return self._ending[state]

    def open_state(self, state: int) -> int:
        """Returns the state of the longest suffix that is a proper prefix of a stop text."""
        # A whole stop text, unless a prefix of another, is complete already.
        while not self._next[state] and state != _ROOT:
            state = self._fallback[state]
        return state

    def held_length(self, state: int) -> int:
        return self._depth[state]

    def held_text(self, state: int, start: int, end: int) -> str:
        """A slice of the text held back in `state`."""
        return self._owner[state][start:end]

    def _add(self, stop_index: int, text: str) -> None:
        state = _ROOT
        for depth, character in enumerate(text, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._owner.append(text)
                self._ending.append(None)
            state = self._next[state][character]
        if self._ending[state] is None:
            self._ending[state] = Ending(stop_index, len(text))

    def _link(self) -> None:
        """Links every state to the state of the longest proper suffix, level by level."""
        level = list(self._next[_ROOT].values())
        while level:
            below: list[int] = []
            for state in level:
                fallback = self._fallback[state]
                if self._ending[state] is None:
                    self._ending[state] = self._ending[fallback]
                for character, child in self._next[state].items():
                    self._fallback[child] = self.step(fallback, character)
                    below.append(child)
            level = below


def spellings(
    texts: Sequence[str], omitted: SpecialTokens, marks: dict[int, str]
) -> Iterator[tuple[int, str]]:
    """Yields each stop text with the index, and the variant with marks if there are special tokens. Fills `marks`."""
    for stop_index, text in enumerate(texts):
        yield stop_index, text
        if (marked := omitted.marked(text, marks)) != text:
            yield stop_index, marked
