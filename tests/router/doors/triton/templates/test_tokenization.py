"""Word lists as `preprocessing` returns them."""

from __future__ import annotations

from trtmesh.router.doors.triton.templates.tokenization import format_words


def test_format_words_pads_ids_and_offsets() -> None:
    assert format_words([[]]) == ((1, 2, 1), b"\0\0\0\0\xff\xff\xff\xff")
    shape, _ = format_words([[[5, 6], [7]], [[8]]])
    assert shape == (2, 2, 3)
