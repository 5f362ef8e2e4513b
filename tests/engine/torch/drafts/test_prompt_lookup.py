"""Drafts from a sequence's own text."""

from __future__ import annotations

from random import Random

import pytest
from trtmesh.engine.backends.torch.drafts import prompt_lookup
from trtmesh.engine.backends.torch.drafts.prompt_lookup import SuffixIndex


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ([], 4, []),
        ([1], 4, []),
        ([1, 2, 3, 4], 4, []),
        # As many as match.
        ([1, 2, 3, 4, 5, 9, 1, 2], 4, [3, 4]),
        ([1, 2, 3, 4, 5, 9, 1, 2, 3], 2, [4, 5]),
        # The longer match beats the later.
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1, [3]),
        # Of equal ones the later.
        ([1, 2, 3, 8, 1, 2, 4, 9, 1, 2], 1, [4]),
        # A repetition goes on.
        ([1, 2, 3] * 3, 8, [1, 2, 3, 1, 2, 3]),
    ],
)
def test_what_followed_the_longest_suffix(
    tokens: list[int], most: int, expected: list[int]
) -> None:
    assert proposed(tokens, most) == expected


def proposed(tokens: list[int], most: int = 8) -> list[int]:
    index = SuffixIndex(tokens)
    assert index.catch_up()
    return list(index.find(tokens, most)[1])


def test_an_index_grows_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Random(1)
    tokens = [dice.randrange(6) for _ in range(300)]
    text: list[int] = []
    grown = SuffixIndex(text)
    for length in range(1, len(tokens), dice.randint(1, 3)):
        text += tokens[len(text) : length]
        assert grown.catch_up()
        assert list(grown.find(text, 8)[1]) == proposed(text)
    expected = proposed(tokens)
    monkeypatch.setattr(prompt_lookup, "TOKENS_AT_ONCE", 100)
    late = SuffixIndex(tokens)
    # A long prompt is taken in over several steps.
    assert [late.catch_up() for _ in range(3)] == [False, False, True]
    assert list(late.find(tokens, 8)[1]) == expected
