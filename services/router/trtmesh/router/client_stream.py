"""What waits to be sent to one client: events in order, tokens of a sequence merged while they wait."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import accumulate

from trtmesh.router.turns import Turns
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import router_pb2 as router_pb

MOST_TENSOR_BYTES = 2 * 2**20
"""Logits of one message, unless one token has more: below the 4 MiB that gRPC clients take if they say nothing."""


@dataclass(slots=True)
class _WaitingTokens:
    """Tokens of one sequence that may still grow: nothing of that sequence was queued behind them."""

    batch_index: int
    sequence_index: int
    token_offset: int
    token_ids: list[int]
    texts: list[str]
    details: pb.TokenDetails | None

    @property
    def end(self) -> int:
        """Offset of the token that would follow."""
        return self.token_offset + len(self.token_ids)

    def clear(self) -> None:
        """Makes place for the whole sequence anew; what was sent of it is replaced."""
        self.token_offset = 0
        self.token_ids, self.texts, self.details = [], [], None


class ClientStream:
    """The queue between the data path, which only puts, and the RPC handler, which only takes.

    Nothing is merged by a timer: a client that keeps up gets every step as its own message, and one that lags gets
    what piled up while the last message was on its way. Deltas of several items that are ready together leave as
    one message, as far as their logits fit one, and the opening event leaves with the first that follows it.
    """

    def __init__(self, opening: router_pb.GenerateEvent, turns: Turns) -> None:
        self._turns = turns
        self._entries: list[_WaitingTokens | router_pb.GenerateEvent] = [opening]
        self._followed = False
        self._growing: dict[tuple[int, int], _WaitingTokens] = {}
        self._taker: asyncio.Future[None] | None = None
        self._closed = False
        self.waiting_tokens = 0
        self.waiting_tensor_bytes = 0
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
            self.waiting_tensor_bytes -= _tensor_bytes(waiting)
            waiting.clear()
        self.waiting_tokens += len(token_ids)
        if waiting is None or _holds_tensor(details):
            waiting = _WaitingTokens(
                batch_index, sequence_index, token_offset, token_ids, [text], details
            )
            self._growing[key] = waiting
            self._append(waiting)
            return
        self.merged_tokens += len(token_ids)
        waiting.token_ids += token_ids
        waiting.texts.append(text)
        if waiting.details is None:
            waiting.details = details
        elif details is not None:
            waiting.details.MergeFrom(details)

    def put(self, event: router_pb.GenerateEvent) -> None:
        """Queues any other event behind everything queued before it."""
        self._growing.pop((event.batch_index, event.sequence_index), None)
        self._append(event)

    def close(self) -> None:
        """Says that nothing more comes; `take` gives what is left and then None."""
        self._closed = True
        self._wake()

    async def take(self) -> router_pb.GenerateResponse | None:
        """All that waits, as one message; None at the end. One taker only, which comes back once it has sent it."""
        self._taken_at = None
        while not self._followed:
            if self._closed:
                return None
            self._taker = asyncio.get_running_loop().create_future()
            await self._taker
        response = router_pb.GenerateResponse()
        for entry in self._take_entries():
            event = response.events.add()
            if isinstance(entry, _WaitingTokens):
                _fill(event, entry)
            else:
                event.CopyFrom(entry)
        self._taken_at = asyncio.get_running_loop().time()
        return response

    def unread_seconds(self, now: float) -> float:
        """How long the last message has been on its way, at the event loop's time `now`; 0 when none is."""
        return 0.0 if self._taken_at is None else now - self._taken_at

    def _take_entries(self) -> list[_WaitingTokens | router_pb.GenerateEvent]:
        """What the next message carries: everything, unless its logits are too large for one."""
        entries, count = self._entries, len(self._entries)
        if self.waiting_tensor_bytes > MOST_TENSOR_BYTES:
            totals = accumulate(map(_tensor_bytes, entries))
            count = max(1, sum(total <= MOST_TENSOR_BYTES for total in totals))
        taken, self._entries = entries[:count], entries[count:]
        if not self._entries:
            self._growing.clear()
            self._followed = False
            self.waiting_tokens = self.waiting_tensor_bytes = 0
            return taken
        for entry in taken:
            self.waiting_tensor_bytes -= _tensor_bytes(entry)
            if isinstance(entry, _WaitingTokens):
                self.waiting_tokens -= len(entry.token_ids)
                key = (entry.batch_index, entry.sequence_index)
                if self._growing.get(key) is entry:
                    del self._growing[key]
        return taken

    def _append(self, entry: _WaitingTokens | router_pb.GenerateEvent) -> None:
        self._entries.append(entry)
        self.waiting_tensor_bytes += _tensor_bytes(entry)
        self._followed = True
        self._wake()

    def _wake(self) -> None:
        if self._taker is not None:
            self._turns.ask(self._taker)
            self._taker = None


def _holds_tensor(details: pb.TokenDetails | None) -> bool:
    """Whether merging is impossible: arrays grow like tokens, tensors do not."""
    return details is not None and details.HasField("generation_logits")


def _tensor_bytes(entry: _WaitingTokens | router_pb.GenerateEvent) -> int:
    if not isinstance(entry, _WaitingTokens):
        details = entry.prompt_details if entry.HasField("prompt_details") else None
        return len(details.context_logits.data) if details is not None else 0
    return len(entry.details.generation_logits.data) if entry.details is not None else 0


def _fill(event: router_pb.GenerateEvent, entry: _WaitingTokens) -> None:
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
