"""Stop texts, compiled into an automaton that reads a text once, however many stop texts there are.

The method of Aho and Corasick: a state is the longest end of the text that begins a stop text. A character that does
not continue it falls back to ever shorter ones. Each character lengthens the state by at most one, so a text of N
characters falls back at most N times.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopAutomaton:
    """Shared by the sequences of a call: each keeps a state, which is START at first."""

    START = 0

    def __init__(self, stop_texts: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        """By state: the state after each character that continues a stop text."""
        self._lengths = [0]
        self._found: list[str | None] = [None]
        self._shorter = [0]
        """By state: that of the longest beginning that is a proper end of this one."""
        for text in stop_texts:
            self._add(text)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while character not in self._children[state]:
            if state == self.START:
                return state
            state = self._shorter[state]
        return self._children[state][character]

    def found(self, state: int) -> str | None:
        """The longest stop text that ends here."""
        return self._found[state]

    def open_length(self, state: int) -> int:
        """Length of the longest end of the text that more text may complete to a stop text."""
        # A whole stop text that begins no other one is completed already.
        while not self._children[state] and state != self.START:
            state = self._shorter[state]
        return self._lengths[state]

    def _add(self, text: str) -> None:
        state = self.START
        for length, character in enumerate(text, start=1):
            following = self._children[state].get(character)
            if following is None:
                following = self._children[state][character] = len(self._children)
                self._children.append({})
                self._lengths.append(length)
                self._found.append(None)
                self._shorter.append(self.START)
            state = following
        self._found[state] = text

    def _link(self) -> None:
        """Sets the shorter states and what is found there, short ones first."""
        states = list(self._children[self.START].values())
        for state in states:
            for character, following in self._children[state].items():
                shorter = self.step(self._shorter[state], character)
                self._shorter[following] = shorter
                self._found[following] = self._found[following] or self._found[shorter]
                states.append(following)
