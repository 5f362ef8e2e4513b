"""How often a peer may send what costs work and serves no stream: beyond, the connection ends.

The time of a connection is bounded without these limits; they end connections that are good for nothing else. Each is
far above what clients and proxies were seen to send. To open a call and reset it takes a server about 100 us, as long
as to serve a small one; a frame on a closed stream takes 4 us.
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
    per_served: int = 0
    """How many more each call allows that is served. A gateway has the calls of many clients on a connection, and some
    of them always leave or are wrong."""
    per_opened: int = 0
    """How many more each call allows, served or not."""


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


@dataclass(slots=True)
class _Level:
    """The level of a leaky bucket at a time, and how many calls were served and opened until then."""

    level: float
    at: float
    served: int
    opened: int


class Rates:
    """What one peer sent recently."""

    def __init__(self) -> None:
        self._levels: dict[Rate, _Level] = {}
        self._served = self._opened = 0

    def note_opened(self) -> None:
        """A call is opened on the connection, by either side."""
        self._opened += 1

    def note_served(self) -> None:
        """A call of the peer has a response."""
        self._served += 1

    def count(self, rate: Rate) -> None:
        """Counts one. Raises Http2ConnectionError beyond the limit."""
        now = monotonic()
        last = self._levels.get(rate)
        level = 1.0
        if last is not None:
            paid = (now - last.at) * rate.per_second
            paid += (self._served - last.served) * rate.per_served
            paid += (self._opened - last.opened) * rate.per_opened
            level += max(0.0, last.level - paid)
        self._levels[rate] = _Level(level, now, self._served, self._opened)
        if level > rate.burst:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, f"too many {rate.what}")
