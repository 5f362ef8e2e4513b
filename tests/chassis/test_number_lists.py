"""Lists of numbers are whole, however many pieces they are copied in."""

from __future__ import annotations

from array import array

import pytest
from trtmesh.chassis.number_lists import PIECE_NUMBERS, fill, ids_of, tuple_of
from trtmesh.v1 import generation_pb2 as pb

LENGTHS = [0, 1, PIECE_NUMBERS, PIECE_NUMBERS + 1, 3 * PIECE_NUMBERS]


@pytest.mark.parametrize("length", LENGTHS)
def test_a_list_is_copied_whole(length: int) -> None:
    numbers = array("i", range(length))
    message = pb.TokenIds(ids=[7, 8, 9])
    fill(message.ids, numbers)
    assert list(message.ids) == list(numbers)
    assert ids_of(message.ids) == array("I", numbers)
    assert tuple_of(message.ids) == tuple(numbers)


def test_a_number_outside_of_its_type_is_refused() -> None:
    with pytest.raises(ValueError, match="out of range"):
        fill(pb.TokenIds().ids, array("i", [1, -1]))
