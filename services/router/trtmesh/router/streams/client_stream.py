"""What waits to be sent to one client: events in order, tokens of a sequence merged while they wait."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from trtmesh.router.streams.turns import Turns
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MOST_MESSAGE_BYTES = 2 * 2**20
"""Size of one message, unless one token has more: below the 4 MiB that gRPC clients take if they say nothing."""

TOKEN_BYTES = 4
"""What an id counts beside its text and data."""


@dataclass(frozen=True, slots=True)
class Credit:
    """What may wait for one client."""

    tokens: int
    bytes: int


UNLIMITED = Credit(sys.maxsize, sys.maxsize)


class Watcher(Protocol):
    """Whoever acts on a client that is slow."""

    def on_full(self) -> None:
        """More waits than the credit allows; told once until `on_read`."""

    def on_read(self) -> None:
        """Everything taken before was sent, and at most half of the credit waits."""


@dataclass(slots=True)
class WaitingTokens:
    """Tokens of one sequence that may still grow: nothing of that sequence was queued behind them."""

    batch_index: int
    sequence_index: int
    token_offset: int
    token_ids: list[int]
    texts: list[str]
    details: pb.TokenDetails | None
    size: int

    @property
    def end(self) -> int:
        """Offset of the token that would follow."""
        return self.token_offset + len(self.token_ids)

    def clear(self) -> None:
        """Makes place for the whole sequence anew; what was sent of it is replaced."""
        self.token_offset = self.size = 0
        self.token_ids, self.texts, self.details = [], [], None


@dataclass(slots=True)
class WaitingEvent:
    """Any other event."""

    event: router_pb.GenerateEvent
    size: int


Waiting = WaitingTokens | WaitingEvent


class ClientStream:
    """The queue between the data path, which only puts, and the RPC handler, which only takes.

    Nothing is merged by a timer: a client that keeps up gets every step as its own message, and one that lags gets
    what piled up while the last message was on its way. Deltas of several items that are ready together leave as
    one message, as far as they fit one, and the opening event leaves with the first that follows it.
    """

    def __init__(
        self, opening: router_pb.GenerateEvent, turns: Turns, credit: Credit = UNLIMITED
    ) -> None:
        self._turns = turns
        self._credit = credit
        self._entries: list[Waiting] = [WaitingEvent(opening, 0)]
        self._followed = False
        self._growing: dict[tuple[int, int], WaitingTokens] = {}
        self._taker: asyncio.Future[None] | None = None
        self._closed = False
        self.watcher: Watcher | None = None
        self.full = False
        self.waiting_tokens = 0
        self.waiting_bytes = 0
        self.merged_tokens = 0
        self._taken_at: float | None = None

    def put_tokens(
        self,
        batch_index: int,
        sequence_index: int,
        token_offset: int,
        token_ids: list[int],
        text: str,
        details: pb.TokenDetails | None,
    ) -> None:
        """Queues new tokens of a sequence, or all of it anew from offset 0. `token_ids` is taken over."""
        key = (batch_index, sequence_index)
        waiting = self._growing.get(key)
        if waiting is not None and token_offset < waiting.end:
            self.waiting_tokens -= len(waiting.token_ids)
            self.waiting_bytes -= waiting.size
            waiting.clear()
        size = TOKEN_BYTES * len(token_ids) + len(text)
        if details is not None:
            size += details.ByteSize()
        self.waiting_tokens += len(token_ids)
        if waiting is None or _holds_tensor(details) or waiting.size + size > MOST_MESSAGE_BYTES:
            waiting = WaitingTokens(
                batch_index, sequence_index, token_offset, token_ids, [text], details, size
            )
            self._growing[key] = waiting
            self._append(waiting)
            return
        self.merged_tokens += len(token_ids)
        waiting.size += size
        waiting.token_ids += token_ids
        waiting.texts.append(text)
        if waiting.details is None:
            waiting.details = details
        elif details is not None:
            waiting.details.MergeFrom(details)
        self._count(size)

    def put(self, event: router_pb.GenerateEvent) -> None:
        """Queues any other event behind everything queued before it."""
        self._growing.pop((event.batch_index, event.sequence_index), None)
        self._append(WaitingEvent(event, event.ByteSize()))

    def close(self) -> None:
        """Says that nothing more comes; `take` gives what is left, be it the opening event alone, and then None."""
        self._closed = True
        self._followed = bool(self._entries)
        self._wake()

    async def take(self) -> Sequence[Waiting] | None:
        """All that waits, for one message; None at the end. One taker only, which comes back once it has sent it."""
        self._taken_at = None
        self._tell_room()
        while not self._followed:
            if self._closed:
                return None
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        entries = self._take_entries()
        self._taken_at = asyncio.get_running_loop().time()
        return entries

    def unread_seconds(self, now: float) -> float:
        """How long the last message has been on its way, at the event loop's time `now`; 0 when none is."""
        return 0.0 if self._taken_at is None else now - self._taken_at

    def _take_entries(self) -> list[Waiting]:
        """What the next message carries: everything, unless it is too large for one."""
        entries, count = self._entries, len(self._entries)
        if self.waiting_bytes > MOST_MESSAGE_BYTES:
            totals = accumulate(entry.size for entry in entries)
            count = max(1, sum(total <= MOST_MESSAGE_BYTES for total in totals))
        taken, self._entries = entries[:count], entries[count:]
        if not self._entries:
            self._growing.clear()
            self._followed = False
            self.waiting_tokens = self.waiting_bytes = 0
            return taken
        for entry in taken:
            self.waiting_bytes -= entry.size
            if isinstance(entry, WaitingTokens):
                self.waiting_tokens -= len(entry.token_ids)
                key = (entry.batch_index, entry.sequence_index)
                if self._growing.get(key) is entry:
                    del self._growing[key]
        return taken

    def _append(self, entry: Waiting) -> None:
        self._entries.append(entry)
        self._followed = True
        self._count(entry.size)
        self._wake()

    def _count(self, size: int) -> None:
        self.waiting_bytes += size
        credit = self._credit
        over = self.waiting_tokens > credit.tokens or self.waiting_bytes > credit.bytes
        if over and not self.full and self.watcher is not None:
            self.full = True
            self.watcher.on_full()

    def _tell_room(self) -> None:
        credit = self._credit
        if (
            self.full
            and self.waiting_tokens <= credit.tokens // 2
            and self.waiting_bytes <= credit.bytes // 2
        ):
            self.full = False
            assert self.watcher is not None
            self.watcher.on_read()

    def _wake(self) -> None:
        if self._taker is not None:
            self._turns.ask(self._taker)
            self._taker = None


def as_response(waiting: Sequence[Waiting]) -> router_pb.GenerateResponse:
    """What was taken, as the native API sends it."""
    response = router_pb.GenerateResponse()
    for entry in waiting:
        event = response.events.add()
        if isinstance(entry, WaitingTokens):
            _fill(event, entry)
        else:
            event.CopyFrom(entry.event)
    return response


def _holds_tensor(details: pb.TokenDetails | None) -> bool:
    """Whether merging is impossible: arrays grow like tokens, tensors do not."""
    return details is not None and details.HasField("generation_logits")


def _fill(event: router_pb.GenerateEvent, entry: WaitingTokens) -> None:
    if entry.batch_index:
        event.batch_index = entry.batch_index
    if entry.sequence_index:
        event.sequence_index = entry.sequence_index
    tokens = event.tokens
    tokens.token_offset = entry.token_offset
    tokens.token_ids.extend(entry.token_ids)
    tokens.text = entry.texts[0] if len(entry.texts) == 1 else "".join(entry.texts)
    if entry.details is not None:
        tokens.details.CopyFrom(entry.details)
