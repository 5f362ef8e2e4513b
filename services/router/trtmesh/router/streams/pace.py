"""Handles slow clients: their tokens are merged, then their request is paused, then cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field
from trtmesh.chassis.errors import SlowClient
from trtmesh.chassis.fair.budget import Account, Budget
from trtmesh.chassis.settings import Settings
from trtmesh.router.metrics import RouterMetrics
from trtmesh.router.streams.client_stream import ClientStream, Credit

MOST_OVERDRAFT = 16
"""Multiple of the credit that ends a request. Despite a pause, tokens in flight arrive, and beams are never paused."""


class ClientLimits(Settings):
    """Limits on the output waiting for a client."""

    buffer_tokens: Annotated[int, Field(ge=1)] = 65_536
    """Most waiting tokens before `at_limit` applies."""
    buffer_bytes: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Most waiting bytes of tokens, texts, log-probabilities and logits before `at_limit` applies."""
    total_bytes: Annotated[int, Field(ge=1)] = 512 * 2**20
    """Most memory of the output that waits for all clients together; beyond it the request with the largest part ends
    with SLOW_CLIENT."""
    at_limit: Literal["pause", "cancel"] = "pause"
    """Action on a full buffer: `pause` takes the request's sequences off their workers and continues them, on any
    worker, once the client has read; `cancel` ends the request with SLOW_CLIENT."""
    unread_seconds: Annotated[float, Field(gt=0, le=86400)] = 120.0
    """Longest time that a message may stay unread, paused or not, then SLOW_CLIENT."""

    @cached_property
    def credit(self) -> Credit:
        return Credit(self.buffer_tokens, self.buffer_bytes)


@dataclass(slots=True)
class Pace:
    """Watches the client of a request. Calls `_change` when `paused` changes, and `_end` at most once."""

    _limits: ClientLimits
    _waiting: Budget
    """Memory of the output that waits for all clients."""
    _client: ClientStream
    _metrics: RouterMetrics
    _change: Callable[[], None]
    _end: Callable[[SlowClient], None]
    _ended: bool = False
    paused: bool = False
    _account: Account = field(init=False)

    def __post_init__(self) -> None:
        self._account = self._waiting.account(self._shed)

    def on_waiting(self, held: int) -> None:
        """Counts what waits; to make room, it may end a request."""
        self._account.add(held - self._account.held)

    def on_full(self) -> None:
        """The credit is exceeded. Called while a step is distributed, so the action is deferred."""
        asyncio.get_running_loop().call_soon(self._act)

    def on_read(self) -> None:
        """The client has caught up."""
        if self.paused:
            self.paused = False
            self._change()

    def judge(self, now: float) -> None:
        """Ends the request if the client has stalled or a pause does not help."""
        limits, client = self._limits, self._client
        if (
            client.unread_seconds(now) > limits.unread_seconds
            or client.waiting_tokens > MOST_OVERDRAFT * limits.buffer_tokens
            or client.waiting_bytes > MOST_OVERDRAFT * limits.buffer_bytes
        ):
            self._cancel(now)

    def close(self) -> None:
        """The request is over: counts merged tokens and drops the callbacks."""
        self._ended = True
        self._account.close()
        self._change = lambda: None
        self._end = lambda _: None
        self._metrics.merged_tokens += self._client.merged_tokens
        if self._client.merged_tokens:
            self._metrics.slow_clients["coalesced"] += 1

    def _act(self) -> None:
        if not self._client.full or self._ended:
            return
        if self._limits.at_limit == "cancel":
            self._cancel(asyncio.get_running_loop().time())
        elif not self.paused:
            self.paused = True
            self._metrics.slow_clients["paused"] += 1
            self._change()

    def _shed(self) -> None:
        """Ends the request, to make room for other clients."""
        # It is freed with the request: meanwhile no other has to give way.
        self._account.close()
        loop = asyncio.get_running_loop()
        loop.call_soon(self._cancel, loop.time())

    def _cancel(self, now: float) -> None:
        if self._ended:
            return
        self._ended = True
        self._metrics.slow_clients["cancelled"] += 1
        client, limits = self._client, self._limits
        self._end(
            SlowClient(
                f"the client left {client.waiting_tokens} tokens and {client.waiting_bytes} bytes unread for"
                f" {client.unread_seconds(now):.1f} s; limits are {limits.buffer_tokens} tokens"
                f" (client.buffer_tokens), {limits.buffer_bytes} bytes (client.buffer_bytes),"
                f" {limits.unread_seconds:g} s (client.unread_seconds), and {limits.total_bytes} bytes of"
                " all clients (client.total_bytes)"
            )
        )
