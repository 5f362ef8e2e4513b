"""Word lists of the core model: ids and offsets in two rows."""

from __future__ import annotations

from array import array

import pytest
from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.templates.put import parse_words
from trtmesh.router.doors.triton.tensors import InputTensor


def word_list(ids: list[int], offsets: list[int]) -> InputTensor:
    return InputTensor("stop_words_list", "INT32", (1, 2, len(ids)), array("i", [*ids, *offsets]))


@pytest.mark.parametrize(
    ("ids", "offsets", "words"),
    [
        ([], [], []),
        ([0], [-1], []),
        ([14480, 326, 262, 1171], [1, 4, -1, -1], [[14480], [326, 262, 1171]]),
        ([24044, 76, 1230], [2, 3, -1], [[24044, 76], [1230]]),
    ],
)
def test_parse_words_splits_ids_at_offsets(
    ids: list[int], offsets: list[int], words: list[list[int]]
) -> None:
    assert [list(word) for word in parse_words(word_list(ids, offsets), 0)] == words


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [
        ([262], [5]),
        ([1, 2, 3], [-1, 2, -1]),
        ([1, 2, 3], [2, 1, -1]),
        ([1, 2, 3], [2, 2, -1]),
        ([1, -2, 3], [2, 3, -1]),
    ],
    ids=["out of bounds", "-1 inside", "falling", "not growing", "a negative id"],
)
def test_parse_words_refuses_malformed_offsets(ids: list[int], offsets: list[int]) -> None:
    with pytest.raises(InvalidRequest, match="Invalid format for word list"):
        parse_words(word_list(ids, offsets), 0)
