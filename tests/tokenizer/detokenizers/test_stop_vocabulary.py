"""A worker finds the stop texts of a sequence where the tokenizer finds them."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizer.tokenizers_zoo import CORPUS, ZOO, ids_of
from tokenizers import Tokenizer
from trtmesh.chassis.stop_texts import NO_SPECIAL_TOKENS, SpecialTokens, StopTexts
from trtmesh.chassis.stopping import StopVocabulary
from trtmesh.tokenizer.decoding.stop_matcher import StopMatcher
from trtmesh.tokenizer.detokenizers.base import REPLACEMENT, Detokenizer
from trtmesh.tokenizer.detokenizers.choice import choose_detokenizer
from trtmesh.tokenizer.detokenizers.stop_vocabulary import StopVocabularies
from trtmesh.tokenizer.detokenizers.windowed import WholeDetokenizer, WindowedDetokenizer

Family = tuple[Tokenizer, StopVocabularies, bool]
STOPS = ["e", " the", "quick b", "界", "\n\n", "ö", "own f", "ick", "x j", "é"]
FAMILIES = ["byte_level_bpe", "llama2_bpe", "unigram_byte_fallback", "windowed", "whole"]
"""Tokens add the same text anywhere, the first place excepted."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    kind = request.param
    tokenizer = ZOO["byte_level_bpe" if kind in ("windowed", "whole") else kind][0]()
    if kind == "windowed":
        return (
            tokenizer,
            StopVocabularies(WindowedDetokenizer(tokenizer), SpecialTokens.of(tokenizer)),
            True,
        )
    if kind == "whole":
        return (
            tokenizer,
            StopVocabularies(WholeDetokenizer(tokenizer), SpecialTokens.of(tokenizer)),
            True,
        )
    return (
        tokenizer,
        StopVocabularies(choose_detokenizer(tokenizer), SpecialTokens.of(tokenizer)),
        False,
    )


def worker_stops(known: StopVocabularies, texts: list[str], *, skip: bool) -> StopVocabulary:
    found = known.of(tuple(texts), skip_special_tokens=skip)
    tokens = dict(zip(found.token_ids, found.token_texts, strict=True))
    return StopVocabulary(found.stop_texts, tokens, found.textless_from)


def first_stop(stops: StopVocabulary, ids: list[int]) -> int | None:
    """Number of tokens up to the end of the first stop text."""
    state = stops.START
    for count, token in enumerate(ids, 1):
        state, stopped_text = stops.follow(state, token)
        if stopped_text:
            return count
    return None


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(CORPUS),
    # Rules for the first token of a text do not apply within.
    st.integers(1, 40),
    st.lists(st.sampled_from(STOPS), min_size=1, max_size=4),
    st.booleans(),
)
def test_worker_stops_with_the_token_that_completes_a_stop_text(
    family: Family, text: str, start: int, stops: list[str], skip: bool
) -> None:
    tokenizer, known, by_library = family
    # The library has no text for a part of a character.
    assume(not by_library or all(map(str.isascii, stops)))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    start = min(start, len(ids) - 1)

    def told(count: int) -> str:
        return str(tokenizer.decode(ids[:count], skip_special_tokens=skip))

    before = told(start)
    assume(REPLACEMENT not in before)
    expected = next(
        (
            count
            for count in range(1, len(ids) - start + 1)
            if any(stop in told(start + count)[len(before) :] for stop in stops)
        ),
        None,
    )
    assert first_stop(worker_stops(known, stops, skip=skip), ids[start:]) == expected


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abcd", max_size=5), max_size=12),
)
def test_any_split_of_a_text_into_tokens_finds_the_stop_text(
    stops: list[str], tokens: list[str]
) -> None:
    """Tokens are any texts, the empty one included."""
    vocabulary = sorted(set(tokens) | {"", "d"})

    class Texts:
        name = "texts"

        def token_bytes(self, *, skip_special_tokens: bool) -> list[bytes]:
            return [token.encode() for token in vocabulary]

    described = cast("Detokenizer", Texts())
    found = worker_stops(StopVocabularies(described, NO_SPECIAL_TOKENS), stops, skip=True)
    matcher, expected = StopMatcher(StopTexts(stops), include_stop_text=True), None
    for count, token in enumerate(tokens, 1):
        matcher.push(token)
        if matcher.stop_index is not None:
            expected = count
            break
    assert first_stop(found, [vocabulary.index(token) for token in tokens]) == expected


def test_worker_stops_with_a_special_token_that_the_text_omits(family: Family) -> None:
    tokenizer, known, _ = family
    before = tokenizer.encode("The quick brown fox", add_special_tokens=False).ids
    end, other = ids_of(tokenizer, "<|im_end|>", "<pad>")
    unknown = tokenizer.get_vocab_size() + 3
    ids = [*before, unknown, other, end, *before]
    for stop, omits, shown in (
        ("<|im_end|>", len(before) + 3, len(before) + 3),
        ("fox<|im_end|>", len(before) + 3, None),
        ("fox<pad><|im_end|>", len(before) + 3, len(before) + 3),
        ("dog<|im_end|>", None, None),
    ):
        for skip, expected in ((True, omits), (False, shown)):
            assert first_stop(worker_stops(known, [stop], skip=skip), ids) == expected, stop
