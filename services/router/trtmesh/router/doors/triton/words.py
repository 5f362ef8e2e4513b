"""Word lists of the core model: for each row the ids of all words, and below them where each word ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from trtmesh.chassis.errors import InvalidRequest
from trtmesh.router.doors.triton.tensors import InputTensor

PAD_OFFSET = -1


def parse_words(tensor: InputTensor, row: int) -> list[Sequence[int]]:
    """The words of a row of shape [2, n]. Raises InvalidRequest."""
    elements = tensor.row(row)
    length = len(elements) // 2
    ids, offsets = elements[:length], list(elements[length:])
    while offsets and offsets[-1] == PAD_OFFSET:
        offsets.pop()
    words: list[Sequence[int]] = []
    start = 0
    for end in offsets:
        if not start < end <= length:
            raise InvalidRequest(
                f"Invalid format for word list: input '{tensor.name}' has the offset {end} behind {start}, but"
                f" offsets must grow up to at most {length} and then be -1"
            )
        word = ids[start:end]
        if min(word) < 0:
            raise InvalidRequest(
                f"Invalid format for word list: input '{tensor.name}' holds an id below 0"
            )
        words.append(word)
        start = end
    return words


def format_words(rows: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[int, ...], bytes]:
    """Shape [rows, 2, n] and data of the word lists of each row: ids padded with 0, offsets with -1."""
    length = max((sum(map(len, words)) for words in rows), default=0)
    length = max(1, length, *map(len, rows))
    data = array("i")
    for words in rows:
        ids = [token_id for word in words for token_id in word]
        offsets: list[int] = []
        for word in words:
            offsets.append((offsets[-1] if offsets else 0) + len(word))
        data.extend(ids + [0] * (length - len(ids)))
        data.extend(offsets + [PAD_OFFSET] * (length - len(offsets)))
    return (len(rows), 2, length), data.tobytes()
