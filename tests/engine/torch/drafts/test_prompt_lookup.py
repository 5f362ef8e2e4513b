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
    assert SuffixIndex().propose(tokens, most) == expected


def test_an_index_grows_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = Random(1)
    tokens = [dice.randrange(6) for _ in range(300)]
    grown = SuffixIndex()
    for length in range(1, len(tokens), dice.randint(1, 3)):
        assert grown.propose(tokens[:length], 8) == SuffixIndex().propose(tokens[:length], 8)
    expected = SuffixIndex().propose(tokens, 8)
    monkeypatch.setattr(prompt_lookup, "TOKENS_AT_ONCE", 100)
    late = SuffixIndex()
    # A long prompt is taken in over several steps.
    found = [late.propose(tokens, 8) for _ in range(3)]
    assert found == [[], [], expected]
