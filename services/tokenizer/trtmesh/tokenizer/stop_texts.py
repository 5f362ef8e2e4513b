"""Finds stop texts in a text that comes in parts.

An Aho-Corasick automaton: its state after some text is the longest suffix that begins a stop text. That suffix is
exactly what must be held back, and it can be read off the stop text, so a matcher keeps nothing but the number of
its state. A character costs the same on average, whatever the number and length of the stop texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """A stop text that ends at a state."""

    stop_index: int
    length: int


class StopTexts:
    """Stop texts, none of them empty, made ready for any number of matchers."""

    # Weakly referred to by whoever shares it between sequences.
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
        # The text of a state is the beginning, `depth` long, of this stop text.
        self._owner = [""]
        self._ending: list[Ending | None] = [None]
        for stop_index, text in enumerate(texts):
            self._add(stop_index, text)
        self._fallback = [_ROOT] * len(self._depth)
        self._link()
        first_characters = "".join(map(re.escape, self._next[_ROOT]))
        self._first_character = re.compile(f"[{first_characters}]")

    def find_start(self, text: str) -> int:
        """Position of the first character that begins a stop text; the length of the text if there is none."""
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
        """The longest stop text that ends in `state`; of equal texts the first."""
        return self._ending[state]

    def held_length(self, state: int) -> int:
        return self._depth[state]

    def held_text(self, state: int, start: int, end: int) -> str:
        """Part of what is held back in `state`."""
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
        """Points every state to the longest shorter suffix of its text that is a state too, level by level."""
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
    """The state of one sequence. The match that ends first wins; of those that end together, the longest."""

    __slots__ = ("_include_stop_text", "_state", "_stop_texts", "stop_index")

    def __init__(self, stop_texts: StopTexts, *, include_stop_text: bool) -> None:
        self._stop_texts = stop_texts
        self._include_stop_text = include_stop_text
        self._state = _ROOT
        self.stop_index: int | None = None
        """Which stop text was found; after that nothing may be pushed."""

    def push(self, text: str) -> str:
        """The text that is certain now: all but a possible beginning of a stop text, and cut at a match."""
        stops, state, start = self._stop_texts, self._state, 0
        if state == _ROOT and (start := stops.find_start(text)) == len(text):
            return text
        for position in range(start, len(text)):
            state = stops.step(state, text[position])
            if (ending := stops.ending(state)) is not None:
                self.stop_index = ending.stop_index
                cut = 0 if self._include_stop_text else ending.length
                return self._release(text[: position + 1], cut, _ROOT)
        return self._release(text, stops.held_length(state), state)

    def flush(self) -> str:
        """What is held back: the text is over, so it was no stop text."""
        return self._release("", 0, _ROOT)

    def _release(self, text: str, kept: int, state: int) -> str:
        """What was held and `text`, without the last `kept` characters. Copies only what it gives out."""
        stops, before, self._state = self._stop_texts, self._state, state
        released_of_text = len(text) - kept
        if before == _ROOT:
            return text[:released_of_text] if kept else text
        held = stops.held_length(before)
        if released_of_text >= 0:
            return stops.held_text(before, 0, held) + text[:released_of_text]
        return stops.held_text(before, 0, held + released_of_text)
