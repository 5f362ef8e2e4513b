"""Header blocks that are decoded once mean what HPACK says."""

from __future__ import annotations

from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st
from trtmesh.chassis.http2.frames import END_HEADERS, Frame, FrameType
from trtmesh.chassis.http2.headers import (
    MAX_REMEMBERED,
    MAX_REMEMBERED_SIZE,
    HeaderDecoder,
    literal_field,
)

FIELDS = [
    *((b":path", b"/one"), (b":path", b"/other"), (b"te", b"trailers"), (b"x", b"y" * 900)),
    *((b"authorization", b"secret"), (b"x", b""), (b":method", b"POST")),
]
"""Few, so that blocks come again; entries of 900 bytes soon leave a table of 4,096 or less."""

BLOCKS = st.lists(
    st.tuples(
        st.sampled_from([None, None, 0, 60, 1000, 4096]),
        st.lists(st.sampled_from(FIELDS), max_size=4),
    ),
    max_size=30,
)
"""New sizes of the encoder's table, and header lists."""


def frame(stream_id: int, block: bytes) -> Frame:
    return Frame(FrameType.HEADERS, END_HEADERS, stream_id, block)


@given(BLOCKS, st.booleans())
def test_equal_blocks_have_the_fields_of_their_time(
    blocks: list[tuple[int | None, list[tuple[bytes, bytes]]]], huffman: bool
) -> None:
    encoder, decoder = Encoder(), HeaderDecoder()
    for number, (size, fields) in enumerate(blocks):
        if size is not None:
            encoder.header_table_size = size
        block = decoder.headers(frame(2 * number + 1, encoder.encode(fields, huffman=huffman)))
        assert block
        assert block.stream_id == 2 * number + 1
        assert block.fields == tuple(fields)


def test_index_means_the_entry_of_now() -> None:
    """The same byte names another field after each new entry."""
    decoder, newest = HeaderDecoder(), b"\xbe"
    for number in range(30):
        value = b"%02d" % number
        decoder.headers(frame(1, b"\x40\x01a\x02" + value))
        for _ in range(2):
            block = decoder.headers(frame(1, newest))
            assert block
            assert block.fields == ((b"a", value),)


def test_remembered_blocks_are_few_and_small() -> None:
    decoder = HeaderDecoder()
    for number in range(10 * MAX_REMEMBERED):
        decoder.headers(frame(1, literal_field(b"a", b"%d" % number)))
        assert len(decoder._remembered) <= MAX_REMEMBERED
    decoder = HeaderDecoder()
    decoder.headers(frame(1, literal_field(b"a", bytes(MAX_REMEMBERED_SIZE))))
    assert not decoder._remembered
