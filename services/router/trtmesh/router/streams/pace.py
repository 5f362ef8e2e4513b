"""How fast a client reads, and what is done about one that is slow: merge what waits, then pause, then cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trtmesh.chassis.errors import SlowClient
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.streams.client_stream import ClientStream, Credit

AtLimit = Literal["pause", "cancel"]

MOST_OVERDRAFT = 16
"""How many times its credit a client may let wait before its request is ended, although it is paused: what was on its
way, and beam searches, which begin again from nothing when they are moved and are not paused."""


@dataclass(frozen=True, slots=True)
class PaceRules:
    """What may wait for one client, what happens beyond that, and how long one message may stay unread."""

    credit: Credit
    at_limit: AtLimit
    stall_seconds: float


def _nobody(*_: object) -> None:
    """Whom a request is told that is over."""


class Pace:
    """Watches the client of one request. `change` is called whenever `paused` changed, `end` at most once."""

    def __init__(
        self,
        rules: PaceRules,
        client: ClientStream,
        metrics: RouterMetrics,
        change: Callable[[], None],
        end: Callable[[SlowClient], None],
    ) -> None:
        self._rules = rules
        self._client = client
        self._metrics = metrics
        self._change = change
        self._end = end
        self._ended = False
        self.paused = False

    def on_full(self) -> None:
        """More waits than the credit allows. Called in the middle of handing out a step, so it acts behind that."""
        asyncio.get_running_loop().call_soon(self._act)

    def on_read(self) -> None:
        """The client has read so much that there is room again."""
        if self.paused:
            self.paused = False
            self._change()

    def judge(self, now: float) -> None:
        """Ends the request when its client reads nothing for too long, or when pausing does not help."""
        credit, client = self._rules.credit, self._client
        if (
            client.unread_seconds(now) > self._rules.stall_seconds
            or client.waiting_tokens > MOST_OVERDRAFT * credit.tokens
            or client.waiting_bytes > MOST_OVERDRAFT * credit.bytes
        ):
            self._cancel(now)

    def close(self) -> None:
        """The request is over: counts what became of it, and lets go of whom it told."""
        self._ended = True
        self._change = self._end = _nobody
        self._metrics.merged_tokens += self._client.merged_tokens
        if self._client.merged_tokens:
            self._metrics.slow_clients["coalesced"] += 1

    def _act(self) -> None:
        if not self._client.full or self._ended:
            return
        if self._rules.at_limit == "cancel":
            self._cancel(asyncio.get_running_loop().time())
        elif not self.paused:
            self.paused = True
            self._metrics.slow_clients["paused"] += 1
            self._change()

    def _cancel(self, now: float) -> None:
        if self._ended:
            return
        self._ended = True
        self._metrics.slow_clients["cancelled"] += 1
        client, rules = self._client, self._rules
        self._end(
            SlowClient(
                f"the client left {client.waiting_tokens} tokens and {client.waiting_bytes} bytes unread for"
                f" {client.unread_seconds(now):.1f} s; limits are {rules.credit.tokens} tokens"
                f" (client_buffer_tokens), {rules.credit.bytes} bytes (client_buffer_bytes) and"
                f" {rules.stall_seconds:g} s (client_stall_seconds)"
            )
        )
