"""Passes input over HTTP/1.1 on to aiohttp: in turns, a request at a time, and counted.

aiohttp parses the input of a read at once, and keeps 32 requests with bodies while a request is served. This transport
passes on small pieces, each connection in turn, and holds back everything behind a waiting request.
"""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter
from typing import Any, Protocol

from trtmesh.chassis.fair.limits import Budget
from trtmesh.chassis.fair.turns import ParseScheduler
from trtmesh.chassis.http2.writer import SendBuffer
from trtmesh.chassis.logs import Occasionally

log = logging.getLogger(__name__)
occasionally = Occasionally(log)

PIECE_BYTES = 2**12
"""Bytes parsed at once. As chunks of a single byte they take aiohttp a millisecond, mostly in the reading handler.
Content of a body without chunks is only copied, all at once."""


MAX_FRAMING_BYTES = 2**15
"""Most bytes of chunk sizes, extensions and trailers in excess of the bytes of the body: several times the longest
header. Chunks of less than five bytes exceed this; they take a hundred times the CPU of a body in one piece."""


class Reader(Protocol):
    """Parses the input of a client."""

    @property
    def request_waits(self) -> bool:
        """Whether a parsed request waits to begin."""

    @property
    def in_head(self) -> bool:
        """Whether the next bytes belong to no body."""

    @property
    def body_received(self) -> int:
        """Bytes of the present body so far."""

    @property
    def body_left(self) -> int:
        """Bytes of a body to come, only copied."""

    def parse(self, piece: bytes) -> None:
        """Takes the next bytes."""


class InputTransport:
    """Wraps a client's transport, so that the input reaches the reader in turns."""

    def __init__(
        self,
        transport: asyncio.Transport,
        reader: Reader,
        turns: ParseScheduler,
        budget: Budget,
        origin: str = "",
    ) -> None:
        self._transport = transport
        self._reader = reader
        self._turns, self._origin = turns, origin
        self._account = budget.account(self._shed)
        self._waiting = SendBuffer()
        self._head_bytes = 0
        """Bytes of an incomplete head."""
        self._framing_bytes = 0
        """Bytes of framing within a body less the bytes of content, at least 0."""
        self._wanted = True
        """Whether aiohttp has room for more."""
        self._has_turns = False
        """Whether a turn is under way, or planned."""
        self._is_read = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def receive(self, data: bytes) -> None:
        self._waiting.append(data)
        self._take_turns()
        self._settle()

    def pause_reading(self) -> None:
        self._wanted = False
        self._settle()

    def resume_reading(self) -> None:
        # aiohttp calls this for each chunk read.
        if not self._wanted:
            self._wanted = True
            self.go_on_soon()

    def go_on_soon(self) -> None:
        """Has the waiting input parsed after this callback, since the parser may be active."""
        if self._waiting.size:
            asyncio.get_running_loop().call_soon(self._take_turns)
        self._settle()

    def drop(self) -> None:
        """Forgets the waiting input: the connection is lost."""
        self._waiting.clear()
        self._account.close()

    def go_on(self, until: float) -> bool:
        """Parses pieces, during a turn of the connection."""
        late = False
        try:
            while self._has_work and not late:
                self._parse_piece()
                late = perf_counter() >= until
        except Exception:
            # A defect must not keep other connections from their turns.
            log.exception("input over HTTP could not be processed")
            self._transport.abort()
            return False
        self._settle()
        return late and self._has_work

    def completed(self) -> None:
        self._has_turns = False

    @property
    def _has_work(self) -> bool:
        return self._waiting.size > 0 and self._wanted and not self._reader.request_waits

    def _parse_piece(self) -> None:
        size = max(PIECE_BYTES, self._reader.body_left)
        piece = b"".join(self._waiting.take(min(size, self._waiting.size)))
        reader = self._reader
        was_in_head, received = reader.in_head, reader.body_received
        reader.parse(piece)
        goes_on = was_in_head and reader.in_head
        self._head_bytes = self._head_bytes + len(piece) if goes_on else 0
        if was_in_head or reader.in_head:
            self._framing_bytes = 0
            return
        gained = reader.body_received - received
        self._framing_bytes = max(0, self._framing_bytes + len(piece) - 2 * gained)
        if self._framing_bytes > MAX_FRAMING_BYTES:
            self._end(
                "framing", "the chunk sizes, extensions or trailers of a body are longer than it"
            )

    def _take_turns(self) -> None:
        if self._has_work and not self._has_turns:
            self._has_turns = True
            if not self._turns.take(self, self._origin):
                self.completed()

    def _settle(self) -> None:
        """Counts the waiting input, and reads on if there is none."""
        change = self._waiting.size + self._head_bytes - self._account.held
        if change:
            self._account.add(change)
        is_read = self._wanted and not self._waiting.size
        if is_read != self._is_read and not self._transport.is_closing():
            self._is_read = is_read
            (self._transport.resume_reading if is_read else self._transport.pause_reading)()

    def _shed(self) -> None:
        """Ends the connection, to make room for others."""
        self._end("held", "too much of what it sent waits")

    def _end(self, kind: str, problem: str) -> None:
        self.drop()
        occasionally(kind, logging.WARNING, "connection ended: %s", problem)
        self._transport.abort()
