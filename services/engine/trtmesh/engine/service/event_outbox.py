"""Unsent events of one router, under the credit of its acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trtmesh.chassis.errors import InvalidField, SlowClient, TrtmeshError
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.engine.service.step_part import StepPart, merge, split
from trtmesh.engine.service.wire import fill_step
from trtmesh.v1 import engine_pb2 as epb

MAX_PARTS = 64
"""Most waiting parts; then they are merged for good, so that a stalled router costs little memory."""

MOST_TENSOR_BYTES = 16 * 2**20
"""Most bytes of logits per message, unless the message limit is lower; small enough to overlap with the next step."""

MERGED_TOKENS = 2**16
"""Parts are also merged at this many tokens, or at twice the tokens of the last merge: beams are resent whole."""

MAX_KV_EVENTS = 8192
"""More waiting events are dropped; the gap in the sequence numbers makes the router ask for a snapshot."""

MAX_ANSWERS = 4096
"""A router with more unread answers is cut off."""


class EventOutbox:
    """Merges waiting output; `take` returns everything that may be sent now.

    Steps need credit: at most `unacknowledged_steps` are unacknowledged. Other events need none, so a slow router still
    gets the load. Waiting output is bounded by the tokens of the stream's sequences. A message carries at most
    `most_tensor_bytes` of logits, or the logits of one token, and as many of states.
    """

    def __init__(
        self,
        unacknowledged_steps: int,
        metrics: EngineMetrics,
        most_tensor_bytes: int = MOST_TENSOR_BYTES,
    ) -> None:
        self.filled = asyncio.Event()
        self.ending: set[int] = set()
        """Handles with a waiting end; they are not free yet."""
        self._metrics = metrics
        self._credit = unacknowledged_steps
        self._most_tensor_bytes = most_tensor_bytes
        self._sent_steps = 0
        self._acknowledged_steps = 0
        self._farewell: TrtmeshError | None = None
        self._parts: list[StepPart] = []
        self._part_tokens = 0
        self._most_part_tokens = MERGED_TOKENS
        self._ends: list[epb.SequenceEnd] = []
        self._answers: list[epb.EngineEvent] = []
        self._kv_events: list[epb.KvEvent] = []
        self._kv_epoch = 0
        self._kv_first_sequence = 0
        self._load: epb.Load | None = None

    @property
    def unacknowledged_steps(self) -> int:
        """Steps sent and not acknowledged."""
        return self._sent_steps - self._acknowledged_steps

    @property
    def holds_steps(self) -> bool:
        """Whether tokens or ends wait."""
        return bool(self._parts or self._ends)

    def put_step(self, part: StepPart) -> None:
        parts = self._parts
        if part.details or part.prompts:
            parts += split(part, self._most_tensor_bytes)
        else:
            parts.append(part)
        self._part_tokens += len(part.token_ids)
        many = len(parts) >= MAX_PARTS or self._part_tokens > self._most_part_tokens
        if many and self._fitting(parts) == len(parts):
            self._metrics.merged_steps += len(parts) - 1
            parts[:] = [merge(parts)]
            self._part_tokens = len(parts[0].token_ids)
            self._most_part_tokens = max(MERGED_TOKENS, 2 * self._part_tokens)
        self.filled.set()

    def put_end(self, end: epb.SequenceEnd) -> None:
        self._ends.append(end)
        self.ending.add(end.handle)
        self.filled.set()

    def put_load(self, load: epb.Load) -> None:
        self._load = load
        self.filled.set()

    def put_answer(self, event: epb.EngineEvent) -> None:
        """Raises SlowClient when too many answers wait."""
        if len(self._answers) >= MAX_ANSWERS:
            raise SlowClient(
                f"{MAX_ANSWERS} answers wait to be read; read them before sending more commands"
            )
        self._answers.append(event)
        self.filled.set()

    def put_kv_events(self, epoch: int, first_sequence: int, events: Sequence[epb.KvEvent]) -> None:
        if len(self._kv_events) >= MAX_KV_EVENTS:
            self._kv_events.clear()
        if not self._kv_events:
            self._kv_epoch, self._kv_first_sequence = epoch, first_sequence
        self._kv_events += events
        self.filled.set()

    def put_kv_snapshot(self, snapshot: epb.KvEvents) -> None:
        """Replaces the waiting events, which the snapshot covers."""
        self._kv_events.clear()
        self.put_answer(epb.EngineEvent(kv_events=snapshot))

    def acknowledge(self, received_steps: int) -> None:
        """Raises InvalidField for an acknowledgement of unsent steps."""
        if received_steps > self._sent_steps:
            limit = f"at most {self._sent_steps}, the steps sent on this stream"
            raise InvalidField.of("acknowledge.received_steps", received_steps, limit)
        if received_steps > self._acknowledged_steps:
            self._acknowledged_steps = received_steps
            if self.holds_steps:
                self.filled.set()

    def finish(self, farewell: TrtmeshError) -> None:
        """Sends the rest without credit, then ends the stream with `farewell`."""
        self._farewell = farewell
        self.filled.set()

    def check_open(self) -> None:
        """Raises the farewell, whose turn it is once everything was taken."""
        if self._farewell:
            try:
                raise self._farewell
            finally:
                # It has this frame, and so this outbox: they must not be a cycle.
                self._farewell = None

    def take(self, step_count: int) -> epb.EngineServiceConnectResponse | None:
        """Returns the next message with all sendable events, or None."""
        may_step = self._farewell is not None or self.unacknowledged_steps < self._credit
        steps = may_step and self.holds_steps
        if not (steps or self._answers or self._kv_events or self._load):
            return None
        response = epb.EngineServiceConnectResponse(events=self._answers)
        self._answers.clear()
        if self._kv_events:
            events = response.events.add().kv_events
            events.epoch, events.first_sequence = self._kv_epoch, self._kv_first_sequence
            events.events.extend(self._kv_events)
            self._kv_events.clear()
        if steps:
            self._take_step(response.events.add().step, step_count)
        if self._load:
            response.events.add().load.CopyFrom(self._load)
            self._load = None
        return response

    def _take_step(self, step: epb.Step, step_count: int) -> None:
        count = self._fitting(self._parts)
        parts, self._parts = self._parts[:count], self._parts[count:]
        self._part_tokens = sum(len(part.token_ids) for part in self._parts)
        self._most_part_tokens = MERGED_TOKENS
        part = merge(parts) if parts else StepPart(step_count)
        self._metrics.merged_steps += max(0, len(parts) - 1)
        # An end follows all tokens of its sequence.
        ends = [] if self._parts else self._ends[: self._fitting_ends()]
        fill_step(step, part, ends)
        if ends:
            del self._ends[: len(ends)]
            self.ending.difference_update(end.handle for end in ends)
        self._sent_steps += 1

    def _fitting_ends(self) -> int:
        """Number of leading ends for one message, by the states in them; at least 1 if there are ends."""
        total = 0
        for count, end in enumerate(self._ends):
            total += len(end.handoff.backend_state)
            if count and total > self._most_tensor_bytes:
                return count
        return len(self._ends)

    def _fitting(self, parts: Sequence[StepPart]) -> int:
        """Number of leading parts for one message; at least 1 if there are parts."""
        total = 0
        for count, part in enumerate(parts):
            total += part.tensor_bytes
            if count and total > self._most_tensor_bytes:
                return count
        return len(parts)
