"""Finds stop texts across the deltas of a sequence, and holds back text that may become a stop text.

The automaton's state is exactly the held text, a part of the stop text, so a matcher stores only a state number.
"""

from __future__ import annotations

from collections.abc import Mapping

from trtmesh.chassis.stop_texts import StopTexts, without_marks

_ROOT = StopTexts.ROOT


class StopMatcher:
    """Matches a sequence. The first match to end wins; of several, the longest."""

    __slots__ = ("_include_stop_text", "_state", "_stop_texts", "stop_index")

    def __init__(self, stop_texts: StopTexts, *, include_stop_text: bool) -> None:
        self._stop_texts = stop_texts
        self._include_stop_text = include_stop_text
        self._state = _ROOT
        self.stop_index: int | None = None
        """Index of the stop text found; no push may follow."""

    @property
    def marks(self) -> Mapping[int, str]:
        """Marks of the special tokens for `push_mark`."""
        return self._stop_texts.marks

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Returns the certain text: without a possible prefix of a stop text, with `may_end` cut at a match."""
        stops, state, start = self._stop_texts, self._state, 0
        if state == _ROOT and (start := stops.find_start(text)) == len(text):
            return text
        for position in range(start, len(text)):
            state = stops.step(state, text[position])
            if may_end and (ending := stops.ending(state)) is not None:
                self.stop_index = ending.stop_index
                cut = 0 if self._include_stop_text else ending.length
                return self._release(text[: position + 1], cut, _ROOT)
        state = stops.open_state(state)
        return self._release(text, stops.held_length(state), state)

    def push_mark(self, mark: str, rest: str, *, may_end: bool) -> str:
        """Takes a special token omitted from the text; `rest` is the uncertain text before the token."""
        raise NotImplementedError

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


class MarkMatcher(StopMatcher):
    """Matches a sequence with special tokens in the stop texts, but not in the text."""

    __slots__ = ("_ahead", "_marked", "_rest")

    def __init__(self, stop_texts: StopTexts, *, include_stop_text: bool) -> None:
        super().__init__(stop_texts, include_stop_text=include_stop_text)
        self._rest = ""
        """Text before the latest mark, uncertain when the mark came."""
        self._marked = ""
        """The same text with the following marks."""
        self._ahead = _ROOT
        """The state at the end of this text, if all of the text becomes certain."""

    def push(self, text: str, *, may_end: bool = True) -> str:
        if self._marked and text:
            text = self._with_marks(text)
            self._rest = self._marked = ""
        return without_marks(super().push(text, may_end=may_end))

    def push_mark(self, mark: str, rest: str, *, may_end: bool) -> str:
        if not rest:
            return without_marks(super().push(mark, may_end=may_end))
        # A rest may grow for thousands of tokens: each mark costs what is new.
        goes_on = self._marked and rest.startswith(self._rest)
        known, state = (len(self._marked), self._ahead) if goes_on else (0, self._state)
        self._marked = self._with_marks(rest) + mark
        self._rest = rest
        ends = False
        for character in self._marked[known:]:
            state = self._stop_texts.step(state, character)
            ends |= self._stop_texts.ending(state) is not None
        self._ahead = state
        # If the sequence ends here, the rest is certain.
        return without_marks(super().push(self._marked)) if ends and may_end else ""

    def flush(self) -> str:
        return without_marks(super().flush())

    def _with_marks(self, text: str) -> str:
        """New certain text, with the marks in their places."""
        if text.startswith(self._rest):
            return self._marked + text[len(self._rest) :]
        marks = self._stop_texts.marks.values()
        return "".join(mark for mark in self._marked if mark in marks) + text


def matcher_of(stop_texts: StopTexts, *, include_stop_text: bool) -> StopMatcher:
    """The cheapest matcher for these stop texts."""
    kind = MarkMatcher if stop_texts.marks else StopMatcher
    return kind(stop_texts, include_stop_text=include_stop_text)
