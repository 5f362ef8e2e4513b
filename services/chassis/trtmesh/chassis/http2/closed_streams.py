"""Recently closed streams, and the legality of further frames (RFC 9113, section 5.1).

Frames in flight when this side closed a stream are legal. Frames after the peer's END_STREAM or RST_STREAM are not.
Frames on older, forgotten streams pass as late.
"""

from __future__ import annotations

from trtmesh.chassis.http2.frames import (
    ErrorCode,
    Http2ConnectionError,
    Http2StreamError,
)

MAX_REMEMBERED = 256
"""Closed streams remembered for a connection."""


class ClosedStreams:
    """The latest closed streams of a connection."""

    def __init__(self) -> None:
        self._ended_by_peer: dict[int, bool] = {}

    def add(self, stream_id: int, *, ended_by_peer: bool) -> None:
        """Remembers a closed stream, and whether the peer had ended or reset the stream."""
        self._ended_by_peer[stream_id] = ended_by_peer
        if len(self._ended_by_peer) > MAX_REMEMBERED:
            del self._ended_by_peer[next(iter(self._ended_by_peer))]

    def check_data(self, stream_id: int) -> None:
        """Raises Http2StreamError for DATA after the peer's end of the stream."""
        if self._ended_by_peer.get(stream_id):
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA on a closed stream")

    def check_headers(self, stream_id: int) -> None:
        """Raises Http2ConnectionError for HEADERS after the peer's end of the stream, or on a skipped stream."""
        ended = self._ended_by_peer.get(stream_id)
        if ended:
            raise Http2ConnectionError(ErrorCode.STREAM_CLOSED, "HEADERS on a closed stream")
        if ended is None:
            raise Http2ConnectionError(
                ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream below one that was opened"
            )
