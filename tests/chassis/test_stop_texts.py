"""Stop texts in an automaton, against the plain search of every end of a text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Strip
from tokenizers.models import WordLevel
from trtllm_client import DEMO
from trtmesh.chassis.parsing import MAX_STOP_TEXT_CHARACTERS, MAX_WORD_LENGTH, MAX_WORDS
from trtmesh.chassis.stop_texts import SpecialTokens, StopTexts
from trtmesh.engine.gateways.trtllm.texts import Texts

STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=6)


def ending(text: str, stops: Sequence[str]) -> str | None:
    """The longest stop text at the end of a text."""
    return max((stop for stop in stops if text.endswith(stop)), key=len, default=None)


def open_length(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of a text that begins a longer stop text."""
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    return max(
        length for length in range(len(text) + 1) if text[len(text) - length :] in beginnings
    )


@given(STOPS, st.text("abc", max_size=60))
def test_every_character_leads_where_a_plain_search_does(stops: list[str], text: str) -> None:
    automaton = StopTexts(stops)
    state = automaton.ROOT
    for length, character in enumerate(text, start=1):
        state = automaton.step(state, character)
        found = automaton.ending(state)
        assert (found and stops[found.stop_index]) == ending(text[:length], stops)
        held = automaton.held_length(automaton.open_state(state))
        assert held == open_length(text[:length], stops)


REST = MAX_STOP_TEXT_CHARACTERS - MAX_WORD_LENGTH


@pytest.mark.parametrize(
    "stops",
    [
        pytest.param(
            ["b" * MAX_WORD_LENGTH, *(f"b{number:03}" for number in range(MAX_WORDS - 1))],
            id="never begun",
        ),
        pytest.param(["a" * (MAX_WORD_LENGTH - 1) + "b", "a" * (REST // 4) + "c"], id="always"),
        pytest.param(["a" * length + "b" for length in range(1, 170)], id="at every length"),
    ],
)
def test_the_work_does_not_grow_with_the_stop_texts(stops: list[str]) -> None:
    texts = Texts.load(DEMO)
    assert texts is not None
    letter, other = (texts._tokenizer.token_to_id(character) for character in "ac")
    search = texts.follow(texts.stops(stops), [1])
    count = 400
    lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for place in range(count):
            search.add(other if place % 100 == 99 else letter, may_end=True)
    finally:
        sys.settrace(before)
    assert search.found is None
    assert lines < 50 * count


def test_special_token_at_which_the_library_panics_is_known() -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    tokenizer.add_special_tokens([AddedToken("<", special=True), AddedToken("<s>", special=True)])
    tokenizer.decoder = Strip("<", 1, 1)
    assert SpecialTokens.of(tokenizer).ids == {"<": 1, "<s>": 2}
