"""Limits of frames and calls that cost work and serve nobody. A connection beyond a limit ends.

Turns bound the time of a connection already; these limits end useless connections. Each limit is far above the observed
rates of clients and proxies. Opening and resetting a call takes a server about 100 us, like serving a small call; a
frame on a closed stream takes 4 us.
"""

from __future__ import annotations

from trtmesh.chassis.fair.limits import Rate, RateCounts
from trtmesh.chassis.http2.frames import ErrorCode, Http2ConnectionError

SETTINGS = Rate("SETTINGS", 100, 10)
PING = Rate("PING without DATA in between", 1000, 100)
GOAWAY = Rate("GOAWAY", 20, 1)
PRIORITY = Rate("PRIORITY", 2000, 200)
UNKNOWN = Rate("frames of unknown type", 1000, 100)
RST_STREAM = Rate("RST_STREAM", 4000, 1000, per_served=1)
EMPTY_DATA = Rate("DATA without content", 1000, 100)
WINDOW_UPDATE = Rate("WINDOW_UPDATE of a window that was not used", 2000, 200, per_opened=2)
CLOSED_STREAM = Rate("frames on closed streams", 10_000, 2000, per_served=1)
STREAM_ERROR = Rate("invalid frames on streams", 1000, 100)
REFUSED_CALL = Rate("calls that cannot be served", 4000, 400, per_served=1)
FAILED_CALL = Rate("calls that fail by a fault of the client", 4000, 400, per_served=1)
INFORMATION = Rate("1xx responses", 100, 10)

RATES = (
    *(SETTINGS, PING, GOAWAY, PRIORITY, UNKNOWN, RST_STREAM, EMPTY_DATA, WINDOW_UPDATE),
    *(CLOSED_STREAM, STREAM_ERROR, REFUSED_CALL, FAILED_CALL, INFORMATION),
)
"""All of them, for the documentation."""


class FrameRates(RateCounts):
    """Counts the frames and calls of a peer."""

    def count(self, rate: Rate) -> None:
        """Counts a frame or call. Raises Http2ConnectionError beyond the limit."""
        if self.exceeds(rate):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {rate.what}")
