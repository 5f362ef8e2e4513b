"""Queues events for a client in order, merges waiting tokens of a sequence, and pauses or cancels for a slow client."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from pydantic import Field
from trtmesh.chassis.errors import SlowClient
from trtmesh.chassis.fair.limits import Account, Budget
from trtmesh.chassis.forwarding import Forwarder
from trtmesh.chassis.settings import Settings
from trtmesh.router.metrics import RouterMetrics
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MOST_MESSAGE_BYTES = 2 * 2**20
"""Most bytes of a message with several tokens, below the default limit of gRPC clients, 4 MiB."""

ANNOUNCED_SECONDS = 0.1
"""Longest wait of an announcement for the first tokens. Longer than those of 64 requests take that begin together, each
of which would get a message more."""

OPENING_SECONDS = 0.5
"""Longest wait of the opening event for another: without the opening event a client cannot stop a queued request.
Longer than a burst of starts, since a shorter wait would cost as many more messages."""

TOKEN_BYTES = 4
"""Bytes counted for an id beside text and data."""

OBJECT_BYTES = 96
"""Memory of a waiting token beyond the counted bytes: id and text are objects."""

LOOK_BYTES = 2**10
"""Growth of the waiting bytes between two reports: a client that keeps up causes none."""

WRITES_PER_PASS = 128
"""Writes in a pass of the event loop, few enough to leave time for other work; bench/README.md has the measurements."""


BUFFER_TOKENS = 65_536
"""The credit of a client: most tokens that wait for it before its request pauses."""
BUFFER_BYTES = 64 * 2**20
"""Most waiting bytes of tokens, texts, log-probabilities and logits before that."""


@dataclass(slots=True)
class WaitingTokens:
    """Tokens of a sequence, merged until another event of the sequence follows."""

    batch_index: int
    sequence_index: int
    token_offset: int
    token_ids: list[int]
    texts: list[str]
    details: pb.TokenDetails | None
    size: int

    @property
    def end(self) -> int:
        """Offset of the next token."""
        return self.token_offset + len(self.token_ids)

    def clear(self) -> None:
        """Empties the entry for a restart from offset 0."""
        self.token_offset = self.size = 0
        self.token_ids, self.texts, self.details = [], [], None


@dataclass(slots=True)
class WaitingEvent:
    """Any other event."""

    event: router_pb.GenerateEvent
    size: int


Waiting = WaitingTokens | WaitingEvent


class Reminders:
    """Sends what streams hold back, a fixed time after each asked. One timer serves all: most streams send something
    before, and to make and cancel a timer costs as much as fifty calls."""

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._due: dict[ClientStream, float] = {}
        """The first asked first."""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: ClientStream) -> float:
        """Reminds a stream, which has to be dropped before. Returns when."""
        due = self._due[stream] = self._loop.time() + self._seconds
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._look)
        return due

    def drop(self, stream: ClientStream) -> None:
        """The stream needs no reminder any more."""
        del self._due[stream]
        if not self._due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._due:
            stream, due = next(iter(self._due.items()))
            if due > now:
                self._timer = self._loop.call_at(due, self._look)
                return
            stream.send_held()


class WriteScheduler:
    """Has waiting messages written in order, a few in each pass of the event loop.

    A step readies a message for every client at once. If a single pass wrote all messages, a new request would advance
    by a stage per step, and a thousand streams would delay the request by seconds.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._planned = False
        self.openings = Reminders(OPENING_SECONDS)
        self.announcements = Reminders(ANNOUNCED_SECONDS)

    def ask(self, write: Callable[[], None]) -> None:
        """Has `write` called in turn."""
        self._waiting.append(write)
        if not self._planned:
            self._planned = True
            asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        waiting = self._waiting
        for _ in range(min(WRITES_PER_PASS, len(waiting))):
            waiting.popleft()()
        self._planned = bool(waiting)
        if waiting:
            asyncio.get_running_loop().call_soon(self._grant)


class ClientStream(Forwarder[Sequence[Waiting]]):
    """The queue from the data path, the producer, to the RPC handler, the consumer.

    Merging uses no timer: a fast client gets a message per step, and a slow client gets everything queued during the
    last write. Deltas ready together share a message within the limit. The opening event and an announcement wait for
    the next event, each for a time of its own, so that a short answer is a single message.
    """

    def __init__(self, opening: router_pb.GenerateEvent, writes: WriteScheduler) -> None:
        super().__init__()
        # Asking for it costs a system call, and every message needs it.
        self._loop = asyncio.get_running_loop()
        self._writes = writes
        self._entries: list[Waiting] = [WaitingEvent(opening, 0)]
        self._followed = False
        """Whether anything waits that is worth a message."""
        self._reminders: Reminders | None = writes.openings
        """Those that will remind this stream, if any."""
        self._remind_at = writes.openings.add(self)
        self._growing: dict[tuple[int, int], WaitingTokens] = {}
        self.watcher: Pace | None = None
        self.full = False
        self.waiting_tokens = 0
        self.waiting_bytes = 0
        self._reported = False
        self._look_at = self._next_look()
        """Waiting bytes at which the watcher hears of them."""
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
        """Queues new tokens of a sequence, or a restart from offset 0. Takes ownership of `token_ids`."""
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
        """Queues any other event."""
        self._growing.pop((event.batch_index, event.sequence_index), None)
        self._append(WaitingEvent(event, event.ByteSize()))

    def announce(self, event: router_pb.GenerateEvent) -> None:
        """Queues an event to be sent with the next, or alone after a short time."""
        if self._followed:
            self.put(event)
            return
        entry = WaitingEvent(event, event.ByteSize())
        self._entries.append(entry)
        self._count(entry.size)
        if self._loop.time() + ANNOUNCED_SECONDS < self._remind_at:
            self._forget_reminder()
            self._reminders = self._writes.announcements
            self._remind_at = self._reminders.add(self)

    def send_held(self) -> None:
        """Sends the opening event and what was announced without anything else."""
        self._followed = True
        self.wake()

    def _forget_reminder(self) -> None:
        if self._reminders is not None:
            self._reminders.drop(self)
            self._reminders = None
            self._remind_at = math.inf

    def close(self) -> None:
        """Ends the queue: `next_entries` returns the rest, even the opening event alone, then None."""
        self.closed = True
        self._followed = bool(self._entries)
        self.wake()

    @property
    def is_over(self) -> bool:
        """Whether the last message was taken."""
        return self.closed and not self._entries

    def take(self) -> Sequence[Waiting] | None:
        """The entries of the next message, if any is worth one. Called again after the write."""
        self._taken_at = None
        if self.full:
            self._tell_room()
        if not self._followed:
            return None
        entries = self._take_entries()
        if self._reported:
            self._report()
        self._taken_at = self._loop.time()
        return entries

    async def next_entries(self) -> Sequence[Waiting] | None:
        """Waits for the entries of the next message; None at the end. The only consumer calls again after its write."""
        while (entries := self.take()) is None and not self.closed:
            await self._next()
        return entries

    def unread_seconds(self, now: float) -> float:
        """Duration of the current write at `now`, a time of the event loop; 0 between writes."""
        return 0.0 if self._taken_at is None else now - self._taken_at

    def _take_entries(self) -> list[Waiting]:
        """Takes as many entries as fit into a message, and at least the first."""
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
        # Most tokens pass here: `_count` is inlined.
        self.waiting_bytes += entry.size
        if self.waiting_bytes > self._look_at or self.waiting_tokens > BUFFER_TOKENS:
            self._look()
        if not self._planned or self._reminders is not None:
            self.wake()

    def _count(self, size: int) -> None:
        self.waiting_bytes += size
        if self.waiting_bytes > self._look_at or self.waiting_tokens > BUFFER_TOKENS:
            self._look()

    def _look(self) -> None:
        """Tells the watcher the waiting amount, and once the excess."""
        if (watcher := self.watcher) is None:
            return
        self._report()
        over = self.waiting_tokens > BUFFER_TOKENS or self.waiting_bytes > BUFFER_BYTES
        if over and not self.full:
            self.full = True
            watcher.on_full()

    def _report(self) -> None:
        if self.watcher is not None:
            self._reported = bool(self.waiting_bytes)
            self._look_at = self._next_look()
            self.watcher.on_waiting(self.waiting_bytes + OBJECT_BYTES * self.waiting_tokens)

    def _next_look(self) -> int:
        growth = self.waiting_bytes + LOOK_BYTES
        return growth if self.full else min(growth, BUFFER_BYTES)

    def _tell_room(self) -> None:
        if self.waiting_tokens <= BUFFER_TOKENS // 2 and self.waiting_bytes <= BUFFER_BYTES // 2:
            self.full = False
            assert self.watcher is not None
            self.watcher.on_read()

    def wake(self) -> None:
        if self._reminders is not None:
            self._forget_reminder()
        if self._handed is not None and not self._planned:
            self._planned = True
            self._writes.ask(self.write_ready)


def as_response(waiting: Sequence[Waiting]) -> router_pb.GenerateResponse:
    """Builds the native API's message from taken entries."""
    response = router_pb.GenerateResponse()
    for entry in waiting:
        event = response.events.add()
        if isinstance(entry, WaitingTokens):
            _fill(event, entry)
        else:
            event.CopyFrom(entry.event)
    return response


def _holds_tensor(details: pb.TokenDetails | None) -> bool:
    """Whether the details cannot be merged: tensors do not grow like arrays."""
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


MOST_OVERDRAFT = 16
"""Multiple of the credit that ends a request. Despite a pause, tokens in flight arrive, and beams are never paused."""


UNREAD_SECONDS = 120.0
"""Longest time that a message may stay unread, paused or not, then SLOW_CLIENT. Longer than any pause of a network that
connections survive, and what it holds is bounded by the credit and by `client.total_bytes`."""


class ClientLimits(Settings):
    """Limits on the output waiting for a client."""

    total_bytes: Annotated[int, Field(ge=1)] = 512 * 2**20
    """Most memory of the output waiting for all clients together; beyond, the request with the largest part ends with
    SLOW_CLIENT."""


@dataclass(slots=True)
class Pace:
    """Watches the client of a request. Calls `_change` when `paused` changes, and `_end` at most once."""

    _waiting: Budget
    """Memory of the output that waits for all clients."""
    _client: ClientStream
    _metrics: RouterMetrics
    _change: Callable[[], None]
    _end: Callable[[SlowClient], None]
    _ended: bool = False
    paused: bool = False
    _account: Account | None = None
    """None of a client that leaves nothing waiting."""

    def on_waiting(self, held: int) -> None:
        """About `held` bytes wait, of a client that leaves some waiting; to make room, this may end a request."""
        if self._account is None:
            self._account = self._waiting.account(self._shed)
        self._account.add(held - self._account.held)

    def on_full(self) -> None:
        """The credit is exceeded. Called once until `on_read`, amid a step: so the action is deferred."""
        asyncio.get_running_loop().call_soon(self._act)

    def on_read(self) -> None:
        """At most half of the credit is used, and the last message was sent."""
        if self.paused:
            self.paused = False
            self._change()

    def judge(self, now: float) -> None:
        """Ends the request if the client has stalled or a pause does not help."""
        client = self._client
        if (
            client.unread_seconds(now) > UNREAD_SECONDS
            or client.waiting_tokens > MOST_OVERDRAFT * BUFFER_TOKENS
            or client.waiting_bytes > MOST_OVERDRAFT * BUFFER_BYTES
        ):
            self._cancel(now)

    def close(self) -> None:
        """The request is over: counts merged tokens and drops the callbacks."""
        self._ended = True
        if self._account is not None:
            self._account.close()
        self._change = lambda: None
        self._end = lambda _: None
        self._metrics.merged_tokens += self._client.merged_tokens
        if self._client.merged_tokens:
            self._metrics.slow_clients["coalesced"] += 1

    def _act(self) -> None:
        if self._client.full and not self._ended and not self.paused:
            self.paused = True
            self._metrics.slow_clients["paused"] += 1
            self._change()

    def _shed(self) -> None:
        """Ends the request, to make room for other clients."""
        # It is freed with the request: meanwhile no other has to give way.
        assert self._account is not None
        self._account.close()
        loop = asyncio.get_running_loop()
        loop.call_soon(self._cancel, loop.time())

    def _cancel(self, now: float) -> None:
        if self._ended:
            return
        self._ended = True
        self._metrics.slow_clients["cancelled"] += 1
        client = self._client
        self._end(
            SlowClient(
                f"the client left {client.waiting_tokens} tokens and {client.waiting_bytes} bytes unread for"
                f" {client.unread_seconds(now):.1f} s; limits are {BUFFER_TOKENS} tokens, {BUFFER_BYTES}"
                f" bytes, {UNREAD_SECONDS:g} s, and {self._waiting.limit} bytes of all clients (client.total_bytes)"
            )
        )
