"""Handles slow clients: their tokens are merged, then their request is paused, then cancelled."""

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
"""Multiple of the credit that ends a request. Despite a pause, tokens in flight arrive, and beams are never paused."""


@dataclass(frozen=True, slots=True)
class PaceRules:
    """Credit of one client, the action beyond it, and the longest write of one message."""

    credit: Credit
    at_limit: AtLimit
    stall_seconds: float


def _nobody(*_: object) -> None:
    """Replaces the callbacks of a request that is over."""


class Pace:
    """Watches the client of one request. Calls `change` when `paused` changes, and `end` at most once."""

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
        """The credit is exceeded. Called while a step is distributed, so the action is deferred."""
        asyncio.get_running_loop().call_soon(self._act)

    def on_read(self) -> None:
        """The client has caught up."""
        if self.paused:
            self.paused = False
            self._change()

    def judge(self, now: float) -> None:
        """Ends the request if its client has stalled or pausing does not help."""
        credit, client = self._rules.credit, self._client
        if (
            client.unread_seconds(now) > self._rules.stall_seconds
            or client.waiting_tokens > MOST_OVERDRAFT * credit.tokens
            or client.waiting_bytes > MOST_OVERDRAFT * credit.bytes
        ):
            self._cancel(now)

    def close(self) -> None:
        """The request is over: counts its merged tokens and drops the callbacks."""
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
