"""The matcher against a model with the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from searches import examples
from trtmesh.chassis.stop_texts import SpecialTokens, StopTexts
from trtmesh.tokenizer.decoding.stop_matcher import StopMatcher, matcher_of

LETTERS = "ab é"
stop_lists = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=6)
deltas = st.lists(st.text(LETTERS, max_size=7), max_size=20)


def first_match(text: str, stop_texts: list[str]) -> tuple[int, int] | None:
    """End and index of the match: first end, then longest, then first in the list."""
    for end in range(1, len(text) + 1):
        endings = [i for i, stop in enumerate(stop_texts) if text[:end].endswith(stop)]
        if endings:
            return end, min(endings, key=lambda i: (-len(stop_texts[i]), i))
    return None


def longest_beginning(text: str, stop_texts: list[str]) -> int:
    """Length of the longest suffix of `text` equal to a proper prefix of a stop text."""
    lengths = [n for stop in stop_texts for n in range(len(stop)) if text.endswith(stop[:n])]
    return max(lengths)


@settings(max_examples=examples(200, soak=1500), deadline=None)
@given(stop_texts=stop_lists, parts=deltas, include=st.booleans())
def test_push_returns_exactly_the_certain_text(
    stop_texts: list[str], parts: list[str], include: bool
) -> None:
    matcher = StopMatcher(StopTexts(stop_texts), include_stop_text=include)
    seen = released = ""
    for part in parts:
        seen += part
        released += matcher.push(part)
        match = first_match(seen, stop_texts)
        if match is not None:
            end, index = match
            assert matcher.stop_index == index
            assert released == seen[: end if include else end - len(stop_texts[index])]
            return
        assert matcher.stop_index is None
        assert released == seen[: len(seen) - longest_beginning(seen, stop_texts)]
    assert released + matcher.flush() == seen


@settings(max_examples=examples(60, soak=300), deadline=None)
@given(stop_texts=stop_lists, text=st.text(LETTERS, max_size=40), include=st.booleans())
def test_stop_text_spans_deltas(stop_texts: list[str], text: str, include: bool) -> None:
    compiled = StopTexts(stop_texts)
    whole = StopMatcher(compiled, include_stop_text=include)
    expected = whole.push(text)
    split = StopMatcher(compiled, include_stop_text=include)
    released = ""
    for character in text:
        if split.stop_index is None:
            released += split.push(character)
    assert (released, split.stop_index) == (expected, whole.stop_index)


def test_match_that_ends_first_wins() -> None:
    matcher = StopMatcher(StopTexts(["abcd", "bc"]), include_stop_text=False)
    assert matcher.push("xabc") == "xa"
    assert matcher.stop_index == 1


def test_longest_of_matches_ending_together_wins() -> None:
    matcher = StopMatcher(StopTexts(["c", "abc", "bc"]), include_stop_text=False)
    assert matcher.push("xab") == "x"
    assert matcher.push("c") == ""
    assert matcher.stop_index == 1


def test_regex_characters_are_literal() -> None:
    for stop in ("]", "^a", "\\", "-", "[[", "\n\n", "a-z"):
        matcher = StopMatcher(StopTexts([stop, "z-"]), include_stop_text=False)
        assert matcher.push(f"q{stop}") == "q"
        assert matcher.stop_index == 0


class CountingStopTexts(StopTexts):
    """Counts what a long text costs."""

    steps = 0
    copied = 0

    def step(self, state: int, character: str) -> int:
        self.steps += 1
        return super().step(state, character)

    def held_text(self, state: int, start: int, end: int) -> str:
        self.copied += end - start
        return super().held_text(state, start, end)


def test_near_matches_of_a_long_stop_text_stay_linear() -> None:
    text = "a" * 5_000
    stops = CountingStopTexts(["a" * 1_000 + "b", "a" * 500 + "c"])
    stops.steps = 0
    matcher = StopMatcher(stops, include_stop_text=False)
    released = "".join(matcher.push(character) for character in text)
    assert stops.steps == len(text)
    assert stops.copied <= len(text)
    assert len(released) == len(text) - 1_000
    assert released + matcher.flush() == text


class CountingStops(StopTexts):
    """Counts the characters that are read."""

    steps = 0

    def step(self, state: int, character: str) -> int:
        self.steps += 1
        return super().step(state, character)


def test_special_tokens_within_text_that_stays_uncertain_cost_what_is_new() -> None:
    """Byte tokens of SentencePiece are certain at the end of their run, special tokens among them or not."""
    stops = CountingStops(["zq<s>"], SpecialTokens({"<s>": 1}))
    matcher = matcher_of(stops, include_stop_text=False)
    mark = matcher.marks[1]
    for length in range(1, 201):
        assert matcher.push_mark(mark, "A" * length, may_end=True) == ""
    assert stops.steps <= 3 * 200
    assert matcher.push("A" * 200 + "zq") == "A" * 200
    assert matcher.push_mark(mark, "", may_end=True) == ""
    assert matcher.stop_index == 0
