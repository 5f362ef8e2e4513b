"""How often a peer may send what costs work and serves no stream: beyond, the connection ends.

The time of a connection is bounded without these limits; they end connections that are good for nothing else. Each is
far above what clients and proxies were seen to send.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from trtmesh.chassis.http2.frames import ErrorCode, Http2ConnectionError


@dataclass(frozen=True, slots=True, eq=False)
class Rate:
    """A limit: `burst` at once, then `per_second`."""

    what: str
    burst: int
    per_second: float


SETTINGS = Rate("SETTINGS", 100, 10)
PING = Rate("PING without DATA in between", 1000, 100)
GOAWAY = Rate("GOAWAY", 20, 1)
PRIORITY = Rate("PRIORITY", 2000, 200)
UNKNOWN = Rate("frames of unknown type", 1000, 100)
RST_STREAM = Rate("RST_STREAM", 4000, 400)
EMPTY_DATA = Rate("DATA without content", 1000, 100)
WINDOW_UPDATE = Rate("WINDOW_UPDATE of a window that was not used", 2000, 200)
CLOSED_STREAM = Rate("frames on closed streams", 4000, 400)
STREAM_ERROR = Rate("invalid frames on streams", 1000, 100)
REFUSED_CALL = Rate("calls that cannot be served", 4000, 400)
FAILED_CALL = Rate("calls that fail by a fault of the client", 4000, 400)
INFORMATION = Rate("1xx responses", 100, 10)

RATES = (
    *(SETTINGS, PING, GOAWAY, PRIORITY, UNKNOWN, RST_STREAM, EMPTY_DATA, WINDOW_UPDATE),
    *(CLOSED_STREAM, STREAM_ERROR, REFUSED_CALL, FAILED_CALL, INFORMATION),
)
"""All of them, for the documentation."""


class Rates:
    """What one peer sent recently."""

    def __init__(self) -> None:
        self._levels: dict[Rate, tuple[float, float]] = {}
        """Level and time of each leaky bucket."""

    def count(self, rate: Rate) -> None:
        """Counts one. Raises Http2ConnectionError beyond the limit."""
        now = monotonic()
        level, at = self._levels.get(rate, (0.0, now))
        level = max(0.0, level - (now - at) * rate.per_second) + 1
        self._levels[rate] = level, now
        if level > rate.burst:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {rate.what}")
