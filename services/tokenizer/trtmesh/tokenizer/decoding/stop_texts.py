"""Finds stop texts across the deltas of a text, with an Aho-Corasick automaton.

The automaton's state is the longest suffix of the text equal to a prefix of a stop text. Exactly this suffix is held
back. The stop text contains the suffix, so a matcher stores only a state number. The average cost of a character does
not depend on the number and length of the stop texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """A stop text recognized in a state."""

    stop_index: int
    length: int


class StopTexts:
    """The automaton of non-empty stop texts, shared by any number of matchers."""

    __slots__ = (
        "__weakref__",
        "_depth",
        "_ending",
        "_fallback",
        "_first_character",
        "_next",
        "_owner",
    )

    def __init__(self, texts: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        # The text of a state is the first `depth` characters of this stop text.
        self._owner = [""]
        self._ending: list[Ending | None] = [None]
        for stop_index, text in enumerate(texts):
            self._add(stop_index, text)
        self._fallback = [_ROOT] * len(self._depth)
        self._link()
        first_characters = "".join(map(re.escape, self._next[_ROOT]))
        self._first_character = re.compile(f"[{first_characters}]")

    def find_start(self, text: str) -> int:
        """Position of the first possible start of a stop text, else the length of `text`."""
        match = self._first_character.search(text)
        return match.start() if match else len(text)

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while (following := self._next[state].get(character)) is None:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return following

    def ending(self, state: int) -> Ending | None:
        """The longest stop text recognized in `state`; the first of equal texts."""
        return self._ending[state]

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


class StopMatcher:
    """Matches a sequence. The first match to end wins; of several, the longest."""

    __slots__ = ("_include_stop_text", "_state", "_stop_texts", "stop_index")

    def __init__(self, stop_texts: StopTexts, *, include_stop_text: bool) -> None:
        self._stop_texts = stop_texts
        self._include_stop_text = include_stop_text
        self._state = _ROOT
        self.stop_index: int | None = None
        """Index of the stop text found; no push may follow."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Returns the certain text: without a possible prefix of a stop text, cut at a match that `may_end` it."""
        stops, state, start = self._stop_texts, self._state, 0
        if state == _ROOT and (start := stops.find_start(text)) == len(text):
            return text
        for position in range(start, len(text)):
            state = stops.step(state, text[position])
            if may_end and (ending := stops.ending(state)) is not None:
                self.stop_index = ending.stop_index
                cut = 0 if self._include_stop_text else ending.length
                return self._release(text[: position + 1], cut, _ROOT)
        return self._release(text, stops.held_length(state), state)

    def flush(self) -> str:
        """Returns the text held back, at the end of the sequence."""
        return self._release("", 0, _ROOT)

    def _release(self, text: str, kept: int, state: int) -> str:
        """Returns the held text and `text` without the last `kept` characters, copying no more than the result."""
        stops, before, self._state = self._stop_texts, self._state, state
        released_of_text = len(text) - kept
        if before == _ROOT:
            return text[:released_of_text] if kept else text
        held = stops.held_length(before)
        if released_of_text >= 0:
            return stops.held_text(before, 0, held) + text[:released_of_text]
        return stops.held_text(before, 0, held + released_of_text)
