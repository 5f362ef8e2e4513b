"""Frames and header blocks, valid and not, drawn by Hypothesis."""

from __future__ import annotations

from hpack import Encoder
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from trtmesh.chassis.http2.frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    MAX_MAX_FRAME_SIZE,
    MAX_WINDOW_SIZE,
    MIN_MAX_FRAME_SIZE,
    PADDED,
    PRIORITY,
    FrameType,
    Setting,
    frame,
)

OPEN = (1, 3, 5)
"""Streams opened before the drawn frames."""

STREAMS = st.sampled_from([*OPEN * 4, 7, 9, 0, 2, MAX_WINDOW_SIZE])
FLAGS = st.one_of(
    st.sampled_from([0, END_STREAM, END_HEADERS, END_HEADERS | END_STREAM, END_HEADERS | PADDED]),
    st.integers(0, 255),
)
FEW = st.binary(max_size=300)

PATHS = [f"/example.Service/{name}" for name in ("Echo", "Chat", "Many", "Join", "Wait", "None")]
FIELDS = st.one_of(
    st.sampled_from(
        [
            *((":method", "POST"), (":scheme", "http"), (":authority", "a"), (":status", "200")),
            *((":path", path) for path in PATHS),
            *(("te", "trailers"), ("content-type", "application/grpc"), ("content-length", "7")),
            *(("grpc-timeout", "5m"), ("grpc-encoding", "gzip"), ("grpc-status", "0")),
            *(("grpc-status", "x"), ("grpc-message", "%"), ("data-bin", "AAE"), ("Bad", "\n")),
        ]
    ),
    st.tuples(st.text(max_size=20), st.text(max_size=50)),
)

REQUEST = [
    *((":method", "POST"), (":scheme", "http"), (":authority", "a")),
    *(("te", "trailers"), ("content-type", "application/grpc")),
]
RESPONSE = [(":status", "200"), ("content-type", "application/grpc")]


@st.composite
def _blocks(draw: DrawFn) -> bytes:
    """A header block, maybe with changed bytes."""
    fields = draw(
        st.one_of(
            st.sampled_from(PATHS).map(lambda path: [(":path", path), *REQUEST]),
            st.just(RESPONSE),
            st.just([*RESPONSE, ("grpc-status", "0")]),
            st.just([("grpc-status", "0")]),
            st.lists(FIELDS, max_size=8),
        )
    )
    block = bytearray(Encoder().encode(fields, huffman=draw(st.booleans())))
    if block and draw(st.integers(0, 3)) == 0:
        for at in draw(st.lists(st.integers(0, len(block) - 1), max_size=3)):
            block[at] = draw(st.integers(0, 255))
    return bytes(block)


@st.composite
def _messages(draw: DrawFn) -> bytes:
    """A gRPC message, maybe of another length than it says."""
    body = draw(FEW)
    size = draw(st.one_of(st.just(len(body)), st.integers(0, 2**32 - 1)))
    return bytes((draw(st.sampled_from([0, 0, 0, 1, 7])),)) + size.to_bytes(4) + body


SETTINGS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([*Setting]), st.integers(0, 2**16 - 1)),
        st.one_of(st.sampled_from([0, 1, 2**14, 2**16, 2**31 - 1]), st.integers(0, 2**32 - 1)),
    ),
    max_size=4,
).map(lambda values: b"".join(name.to_bytes(2) + value.to_bytes(4) for name, value in values))


def opened(fields: list[tuple[str, str]], paths: tuple[str, ...] = ("", "", "")) -> bytes:
    """HEADERS on the open streams; with a path each if they are requests."""
    return b"".join(
        frame(
            FrameType.HEADERS,
            END_HEADERS,
            stream,
            Encoder().encode([(":path", path)] * bool(path) + fields),
        )
        for stream, path in zip(OPEN, paths, strict=True)
    )


HEADERS = st.builds(frame, st.just(FrameType.HEADERS), FLAGS, STREAMS, _blocks() | FEW)
CALL = st.builds(frame, st.just(FrameType.HEADERS), st.sampled_from([4, 4, 5]), STREAMS, _blocks())
DATA = st.builds(frame, st.just(FrameType.DATA), FLAGS, STREAMS, _messages() | FEW)
CONNECTION = st.one_of(
    st.builds(frame, st.just(FrameType.SETTINGS), st.sampled_from([0, 0, 1]), st.just(0), SETTINGS),
    st.builds(
        frame,
        st.sampled_from([FrameType.WINDOW_UPDATE, FrameType.RST_STREAM]),
        st.just(0),
        STREAMS,
        st.binary(min_size=4, max_size=4),
    ),
    st.builds(frame, st.just(FrameType.GOAWAY), st.just(0), st.just(0), FEW),
    st.builds(frame, st.just(FrameType.CONTINUATION), FLAGS, STREAMS, _blocks() | FEW),
)
SHORT = st.builds(
    frame,
    st.sampled_from([*FrameType]),
    st.sampled_from([0, 0, ACK]),
    st.sampled_from([0, *OPEN]),
    st.binary(max_size=12),
)
"""Often of a wrong length, or on a wrong stream."""
CUT = st.builds(
    frame,
    st.sampled_from([FrameType.DATA, FrameType.HEADERS]),
    st.sampled_from([END_HEADERS | PADDED, END_HEADERS | PRIORITY]),
    st.sampled_from(OPEN),
    st.binary(max_size=8),
)
"""Often too short for what its flags promise."""
WRONG = st.sampled_from(
    [
        frame(FrameType.PRIORITY, 0, 0, bytes(5)),
        frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(4)),
        frame(FrameType.SETTINGS, ACK, 0, bytes(6)),
        *(
            frame(FrameType.SETTINGS, 0, 0, name.to_bytes(2) + value.to_bytes(4))
            for name, value in [
                (Setting.ENABLE_PUSH, 2),
                (Setting.INITIAL_WINDOW_SIZE, MAX_WINDOW_SIZE + 1),
                (Setting.MAX_FRAME_SIZE, MIN_MAX_FRAME_SIZE - 1),
                (Setting.MAX_FRAME_SIZE, MAX_MAX_FRAME_SIZE + 1),
            ]
        ),
    ]
)
"""Of the right length, with a wrong stream or value."""
ANY = st.builds(frame, st.integers(0, 12), FLAGS, STREAMS, FEW)

FRAMES: SearchStrategy[list[bytes]] = st.lists(
    st.one_of(CALL, CALL, DATA, DATA, DATA, HEADERS, CONNECTION, SHORT, CUT, WRONG, ANY),
    min_size=1,
    max_size=25,
)
