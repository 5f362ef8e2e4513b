"""Ends of sequences: token by token, and over a run of tokens at once."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.stopping import End, EndRule, StopVocabulary
from trtmesh.chassis.vocabulary import Stopping
from trtmesh.v1 import generation_pb2 as pb

PROMPT = [9, 9]


def rule(stopping: Stopping, *, limit: int = 100) -> EndRule:
    return EndRule(stopping, (0, 1), len(PROMPT), limit)


def test_the_models_end_ids_end_unless_another_is_given_or_all_are_ignored() -> None:
    tokens = [*PROMPT, 5, 1]
    assert rule(Stopping()).end_after(tokens) == (pb.FINISH_REASON_END_ID, (1,))
    assert rule(Stopping(end_id=7)).end_after(tokens) is None
    assert rule(Stopping(end_id=7)).end_after([*PROMPT, 7]) == (pb.FINISH_REASON_END_ID, (7,))
    assert rule(Stopping(ignore_end_id=True)).end_after(tokens) is None


def test_a_stop_word_ends_with_its_last_token_also_one_that_overlaps_itself() -> None:
    words = rule(Stopping(stop_token_ids=((4, 4, 5), (6,))))
    assert words.end_after([*PROMPT, 4, 4]) is None
    assert words.end_after([*PROMPT, 4, 4, 4, 5]) == (pb.FINISH_REASON_STOP_WORD, (4, 4, 5))
    assert words.end_after([*PROMPT, 6]) == (pb.FINISH_REASON_STOP_WORD, (6,))


def test_a_stop_word_does_not_reach_into_the_prompt() -> None:
    assert rule(Stopping(stop_token_ids=((9, 5),))).end_after([*PROMPT, 5]) is None


def test_min_tokens_delays_end_ids_and_stop_words_but_not_the_limit() -> None:
    early = rule(Stopping(min_tokens=2, stop_token_ids=((5,),)), limit=len(PROMPT) + 4)
    assert early.bans_end_ids(len(PROMPT) + 1)
    assert not early.bans_end_ids(len(PROMPT) + 2)
    assert early.end_after([*PROMPT, 5, 5]) is None
    assert early.end_after([*PROMPT, 5, 5, 5]) == (pb.FINISH_REASON_STOP_WORD, (5,))
    hurried = rule(Stopping(min_tokens=9), limit=len(PROMPT) + 2)
    assert hurried.end_after([*PROMPT, 3, 3]) == (pb.FINISH_REASON_LENGTH, ())


def test_the_content_beats_the_length_at_the_same_token() -> None:
    full = rule(Stopping(), limit=len(PROMPT) + 1)
    assert full.end_after([*PROMPT, 0]) == (pb.FINISH_REASON_END_ID, (0,))


def test_end_id_that_counts_is_the_first_after_min_tokens() -> None:
    ends = rule(Stopping(min_tokens=2))
    assert ends.first_end([*PROMPT, 5, 0, 0], 2) == (5, (pb.FINISH_REASON_END_ID, (0,)))


def test_run_without_an_end_continues_until_the_limit() -> None:
    assert rule(Stopping()).first_end([*PROMPT, 5, 5], 2) is None
    assert rule(Stopping(), limit=4).first_end([*PROMPT, 5, 5, 5], 2) == (
        4,
        (pb.FINISH_REASON_LENGTH, ()),
    )


def test_run_ends_with_a_stop_word_that_began_before_it() -> None:
    words = rule(Stopping(stop_token_ids=((7, 8, 9),)))
    tokens = [*PROMPT, 5, 7, 8, 9, 5]
    assert words.first_end(tokens, 5) == (6, (pb.FINISH_REASON_STOP_WORD, (7, 8, 9)))
    assert words.first_end(tokens, 6) is None


def one_by_one(ends: EndRule, tokens: Sequence[int], start: int) -> tuple[int, End] | None:
    for length in range(start + 1, len(tokens) + 1):
        end = ends.end_after(tokens[:length])
        if end:
            return length, end
    return None


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
    st.integers(0, 30),
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), max_size=3),
    st.integers(0, 10),
    st.integers(1, 40),
)
def test_runs_end_where_single_tokens_do(
    generated: list[int],
    cut: int,
    words: list[tuple[int, ...]],
    min_tokens: int,
    max_tokens: int,
) -> None:
    stopping = Stopping(min_tokens=min_tokens, stop_token_ids=tuple(words))
    ends = rule(stopping, limit=len(PROMPT) + max_tokens)
    tokens, start = [*PROMPT, *generated], len(PROMPT)
    cut = start + min(cut, len(generated))
    expected = one_by_one(ends, tokens, start)
    assert ends.first_end(tokens, start) == expected
    in_two = ends.first_end(tokens[:cut], start) if cut > start else None
    if not in_two and cut < len(tokens):
        in_two = ends.first_end(tokens, cut)
    assert in_two == expected


def texts_after(stops: StopVocabulary, tokens: list[int], *, may_end: bool = True) -> list[str]:
    """What of each token belongs to a text that ends with a stop text."""
    state, found = stops.START, []
    for token in tokens:
        state, text = stops.follow(state, token, may_end=may_end)
        found.append(text)
    return found


def test_stop_text_across_tokens_and_within_one() -> None:
    stops = StopVocabulary([b"abc", b"x"], {1: b"za", 2: b"b", 3: b"cd", 4: b"", 5: b"-x-"})
    assert texts_after(stops, [1, 2, 4, 3]) == ["", "", "", "c"], "4 is without text"
    assert texts_after(stops, [2, 5]) == ["", "-x"]
    assert texts_after(stops, [1, 2, 9, 3]) == [""] * 4, "9 is no part of a stop text"
    textless = StopVocabulary([b"abc"], {1: b"za", 2: b"b", 3: b"cd"}, textless_from=9)
    assert texts_after(textless, [1, 2, 9, 3]) == ["", "", "", "c"]


def test_stop_text_of_parts_of_characters() -> None:
    stops = StopVocabulary(["né".encode()], {1: b"n\xc3", 2: b"\xa9e", 3: b"\xa8"})
    assert texts_after(stops, [1, 2]) == ["", "\xa9"]
    assert texts_after(stops, [1, 3]) == ["", ""]


def test_stop_text_that_may_not_end_is_passed_over_for_good() -> None:
    stops = StopVocabulary([b"ab", b"bcde"], {1: b"a", 2: b"b", 3: b"cd", 4: b"e"})
    state, _ = stops.follow(stops.START, 1)
    state, text = stops.follow(state, 2, may_end=False)
    assert text == ""
    state, text = stops.follow(state, 3)
    assert text == ""
    assert stops.follow(state, 4)[1] == "e", "it began before"
