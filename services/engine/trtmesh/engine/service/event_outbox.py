"""Holds the unsent events of a router until there is credit: merges parts of steps, or splits them by size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import TypeVar

from trtmesh.chassis.error_wire import to_proto
from trtmesh.chassis.errors import InvalidField, SlowClient, TrtmeshError
from trtmesh.chassis.forwarding import Forwarder
from trtmesh.chassis.vocabulary import Tensor
from trtmesh.engine.backend import (
    PromptDetails,
    SequenceEnd,
    SequenceStart,
    TokenDetails,
    TopLogProbs,
)
from trtmesh.engine.service.metrics import EngineMetrics
from trtmesh.v1 import engine_pb2 as epb
from trtmesh.v1 import generation_pb2 as pb
from trtmesh.v1 import kv_transfer_pb2 as transfer

T = TypeVar("T")


@dataclass(slots=True)
class StepPart:
    """A stream's part of a step, or of several merged steps, in parallel lists as in engine.proto's Step.

    `details`, `prompts` and `starts` name sequences by handle, in the field `key`.
    """

    step_count: int
    handles: list[int] = field(default_factory=list)
    token_offsets: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    details: list[TokenDetails] = field(default_factory=list)
    prompts: list[PromptDetails] = field(default_factory=list)
    starts: list[SequenceStart] = field(default_factory=list)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of logits."""
        if not (self.details or self.prompts):
            return 0
        generated = sum(_bytes(each.generation_logits) for each in self.details)
        return generated + sum(_bytes(each.context_logits) for each in self.prompts)


def split(part: StepPart, most_bytes: int) -> list[StepPart]:
    """Splits `part` into parts of at most `most_bytes` of logits; a single token or prompt run may exceed the limit."""
    if part.tensor_bytes <= most_bytes:
        return [part]
    parts = [
        StepPart(part.step_count, prompts=run)
        for run in _runs(part.prompts, lambda each: _bytes(each.context_logits), most_bytes)
    ]
    rows = [piece for row in _rows_of(part) for piece in row.pieces(most_bytes)]
    runs = _runs(rows, lambda row: row.tensor_bytes, most_bytes)
    parts += [_part_of(part.step_count, run) for run in runs]
    # No later than the tokens.
    parts[0].starts = part.starts
    return parts


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence's tokens in a part, with their data."""

    handle: int
    offset: int
    token_ids: list[int]
    details: TokenDetails | None

    @property
    def tensor_bytes(self) -> int:
        return _bytes(self.details.generation_logits) if self.details else 0

    def pieces(self, most_bytes: int) -> list[_Row]:
        """Splits the row into pieces of at most `most_bytes` of logits, or of a single token."""
        count, size = len(self.token_ids), self.tensor_bytes
        if size <= most_bytes or count == 1:
            return [self]
        step = max(1, most_bytes * count // size)
        return [self._piece(at, min(at + step, count)) for at in range(0, count, step)]

    def _piece(self, first: int, end: int) -> _Row:
        assert self.details
        details = _cut(self.details, first, end)
        if end == len(self.token_ids):
            details.cumulative_log_prob = self.details.cumulative_log_prob
        return _Row(self.handle, self.offset + first, self.token_ids[first:end], details)


def _rows_of(part: StepPart) -> Iterator[_Row]:
    details = {each.key: each for each in part.details}
    ends = accumulate(part.token_counts)
    for handle, offset, count, end in zip(
        part.handles, part.token_offsets, part.token_counts, ends, strict=True
    ):
        yield _Row(handle, offset, part.token_ids[end - count : end], details.get(handle))


def _part_of(step_count: int, rows: Sequence[_Row]) -> StepPart:
    return StepPart(
        step_count,
        [row.handle for row in rows],
        [row.offset for row in rows],
        [len(row.token_ids) for row in rows],
        [token for row in rows for token in row.token_ids],
        [row.details for row in rows if row.details],
    )


def _runs(values: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Groups `values` into runs of at most `most` in total size, or of a single larger value."""
    run: list[T] = []
    total = 0
    for value in values:
        size = size_of(value)
        if run and total + size > most:
            yield run
            run, total = [], 0
        run.append(value)
        total += size
    if run:
        yield run


def _bytes(tensor: Tensor | None) -> int:
    return len(tensor.data) if tensor else 0


def merge(parts: Sequence[StepPart]) -> StepPart:
    """Merges parts in step order into one; every handle occurs once, in order of appearance.

    A rewritten sequence (beam search) keeps the latest tokens only.
    """
    if len(parts) == 1:
        return parts[0]
    if _aligned(parts):
        merged = _merge_aligned(parts)
        details: dict[int, TokenDetails] = {}
        for part in parts:
            _add_details(details, part.details)
        merged.details = list(details.values())
    else:
        merged = _merge_by_handle(parts)
    merged.prompts = [prompt for part in parts for prompt in part.prompts]
    merged.starts = [start for part in parts for start in part.starts]
    return merged


def _aligned(parts: Sequence[StepPart]) -> bool:
    """Whether all parts have the same handles, each with a next token, as in a stable batch."""
    handles, offsets = parts[0].handles, parts[0].token_offsets
    size = len(handles)
    return all(
        len(part.token_ids) == size
        and len(part.handles) == size
        and part.handles == handles
        and part.token_offsets == [offset + place for offset in offsets]
        for place, part in enumerate(parts)
    )


def _merge_aligned(parts: Sequence[StepPart]) -> StepPart:
    columns = zip(*(part.token_ids for part in parts), strict=True)
    return StepPart(
        parts[-1].step_count,
        parts[0].handles,
        parts[0].token_offsets,
        [len(parts)] * len(parts[0].handles),
        list(chain.from_iterable(columns)),
    )


def _merge_by_handle(parts: Sequence[StepPart]) -> StepPart:
    tokens: dict[int, list[int]] = {}
    offsets: dict[int, int] = {}
    details: dict[int, TokenDetails] = {}
    for part in parts:
        start = 0
        for handle, offset, count in zip(
            part.handles, part.token_offsets, part.token_counts, strict=True
        ):
            end = start + count
            fresh = part.token_ids[start:end]
            start = end
            if handle not in tokens:
                tokens[handle], offsets[handle] = fresh, offset
                continue
            kept = offset - offsets[handle]
            if kept < len(tokens[handle]):
                kept = max(0, kept)
                del tokens[handle][kept:]
                offsets[handle] = min(offset, offsets[handle])
                if handle in details:
                    details[handle] = _cut(details[handle], 0, kept)
            tokens[handle] += fresh
        _add_details(details, part.details)
    return StepPart(
        parts[-1].step_count,
        list(tokens),
        list(offsets.values()),
        list(map(len, tokens.values())),
        list(chain.from_iterable(tokens.values())),
        list(details.values()),
    )


def _add_details(merged: dict[int, TokenDetails], details: Iterable[TokenDetails]) -> None:
    for later in details:
        earlier = merged.get(later.key)
        merged[later.key] = earlier.then(later) if earlier else later


def _cut(details: TokenDetails, first: int, end: int) -> TokenDetails:
    """The data of the tokens [first, end). The sum is left out: it belongs to the last token."""
    return replace(
        details,
        log_probs=details.log_probs[first:end],
        cumulative_log_prob=None,
        top_log_probs=details.top_log_probs[first:end],
        model_log_probs=details.model_log_probs[first:end],
        generation_logits=_sliced(details.generation_logits, first, end),
    )


def _sliced(tensor: Tensor | None, first: int, end: int) -> Tensor | None:
    if tensor is None or first == end:
        return None
    size = len(tensor.data) // tensor.shape[0]
    data = tensor.data[first * size : end * size]
    return replace(tensor, shape=(end - first, *tensor.shape[1:]), data=data)


MAX_PARTS = 64
"""Most waiting parts. More are merged for good: a stalled router costs little memory."""

MOST_TENSOR_BYTES = 16 * 2**20
"""Most bytes of logits per message, unless the message limit is lower; small enough to overlap with the next step."""

MERGED_TOKENS = 2**16
"""Parts are also merged at this many tokens, or at twice the tokens of the last merge: beams are resent whole."""

MAX_KV_EVENTS = 8192
"""More waiting events are dropped; the gap in the sequence numbers makes the router ask for a snapshot."""

LOAD_SECONDS = 0.05
"""Longest wait of a load for a step that takes it along. A message more costs both sides a wake."""

MAX_ANSWERS = 4096
"""A router with more unread answers is cut off."""


class EventOutbox(Forwarder[epb.EngineServiceConnectResponse]):
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
        step_count: Callable[[], int] = lambda: 0,
    ) -> None:
        """`step_count` is that of the engine, for ends without a step."""
        super().__init__()
        self.ending: set[int] = set()
        """Handles with a waiting end; they are not free yet."""
        self._metrics = metrics
        self._step_count = step_count
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
        self._load_state = (False, epb.WORKER_ROLE_UNSPECIFIED)
        """Of the latest load: whether the worker drains, and its role."""
        self._steps_at_load = 0
        """Steps sent until the latest load."""
        self._lives = False
        """Whether a message is due, even one without events."""

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
        self.wake()

    def put_end(self, end: epb.SequenceEnd) -> None:
        self._ends.append(end)
        self.ending.add(end.handle)
        self.wake()

    def put_load(self, load: epb.Load) -> None:
        """Lets a load wait for the next step, if steps go, and nothing changed that the router acts on at once."""
        self._load = load
        before, self._load_state = self._load_state, (load.draining, load.role)
        flowing = self._sent_steps > self._steps_at_load
        self._steps_at_load = self._sent_steps
        if flowing and self._sink is not None and before == self._load_state:
            self._loop.call_later(LOAD_SECONDS, self._tell_load)
        else:
            self.wake()

    def put_sign_of_life(self) -> None:
        """Has a message sent soon, without events if there are none."""
        self._lives = True
        self.wake()

    def _tell_load(self) -> None:
        if self._load is not None:
            self.wake()

    def put_answer(self, event: epb.EngineEvent) -> None:
        """Raises SlowClient when too many answers wait."""
        if len(self._answers) >= MAX_ANSWERS:
            raise SlowClient(
                f"{MAX_ANSWERS} answers wait to be read; read them before sending more commands"
            )
        self._answers.append(event)
        self.wake()

    def put_kv_events(self, epoch: int, first_sequence: int, events: Sequence[epb.KvEvent]) -> None:
        if len(self._kv_events) >= MAX_KV_EVENTS:
            self._kv_events.clear()
        if not self._kv_events:
            self._kv_epoch, self._kv_first_sequence = epoch, first_sequence
        self._kv_events += events
        self.wake()

    def put_kv_snapshot(self, snapshot: epb.KvEvents) -> None:
        """Replaces the waiting events: the snapshot covers them."""
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
                self.wake()

    def finish(self, farewell: TrtmeshError) -> None:
        """Sends the rest without credit, then ends the stream with `farewell`."""
        self._farewell = farewell
        self.closed = True
        self.wake()

    def check_open(self) -> None:
        """Raises the farewell. Call once everything was taken."""
        if self._farewell:
            try:
                raise self._farewell
            finally:
                # The error holds this frame, and so this outbox: the two must not be a cycle.
                self._farewell = None

    def take(self) -> epb.EngineServiceConnectResponse | None:
        """Returns the next message with all sendable events, or None."""
        steps = bool(self._parts or self._ends) and (
            self._farewell is not None or self.unacknowledged_steps < self._credit
        )
        if not (steps or self._answers or self._kv_events or self._load or self._lives):
            return None
        self._lives = False
        response = epb.EngineServiceConnectResponse(events=self._answers)
        self._answers.clear()
        if self._kv_events:
            events = response.events.add().kv_events
            events.epoch, events.first_sequence = self._kv_epoch, self._kv_first_sequence
            events.events.extend(self._kv_events)
            self._kv_events.clear()
        if steps:
            self._take_step(response.events.add().step)
        if self._load:
            response.events.add().load.CopyFrom(self._load)
            self._load = None
        return response

    def _take_step(self, step: epb.Step) -> None:
        part = self._take_parts()
        # An end follows all tokens of the sequence.
        ends = [] if self._parts or not self._ends else self._ends[: self._fitting_ends()]
        _fill_step(step, part, ends)
        if ends:
            del self._ends[: len(ends)]
            for end in ends:
                self.ending.discard(end.handle)
        self._sent_steps += 1

    def _take_parts(self) -> StepPart:
        """The tokens for one message."""
        self._most_part_tokens = MERGED_TOKENS
        if len(self._parts) == 1:
            # The usual case, of a router that keeps up.
            self._part_tokens = 0
            return self._parts.pop()
        count = self._fitting(self._parts)
        parts, self._parts = self._parts[:count], self._parts[count:]
        self._part_tokens = sum(len(part.token_ids) for part in self._parts)
        self._metrics.merged_steps += max(0, len(parts) - 1)
        return merge(parts) if parts else StepPart(self._step_count())

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


def end_message(
    handle: int, end: SequenceEnd, handoff: transfer.HandoffDescriptor | None = None
) -> epb.SequenceEnd:
    """Encodes the end of the sequence with this handle; `handoff` describes the KV after a handoff."""
    return epb.SequenceEnd(
        handle=handle,
        reason=pb.FinishReason.ValueType(end.reason),
        prompt_tokens=end.prompt_tokens,
        cached_prompt_tokens=end.cached_prompt_tokens,
        generated_tokens=end.generated_tokens,
        stop_token_ids=end.stop_token_ids,
        cumulative_log_prob=end.cumulative_log_prob,
        error=to_proto(end.error) if end.error else None,
        handoff=handoff,
        perf_metrics=end.perf_metrics,
    )


def _fill_step(step: epb.Step, part: StepPart, ends: Sequence[epb.SequenceEnd]) -> None:
    """Writes `part` and `ends` into the empty message `step`."""
    step.step_count = part.step_count
    step.handles.extend(part.handles)
    step.token_offsets.extend(part.token_offsets)
    step.token_counts.extend(part.token_counts)
    step.token_ids.extend(part.token_ids)
    step.ends.extend(ends)
    for details in part.details:
        _fill_details(step.details.add(handle=details.key).details, details)
    for prompt in part.prompts:
        _fill_prompt(step.prompts.add(handle=prompt.key).details, prompt)
    for start in part.starts:
        step.starts.add(handle=start.key, perf_metrics=start.perf_metrics)


def _fill_details(message: pb.TokenDetails, details: TokenDetails) -> None:
    message.log_probs.extend(details.log_probs)
    message.model_log_probs.extend(details.model_log_probs)
    if details.cumulative_log_prob is not None:
        message.cumulative_log_prob = details.cumulative_log_prob
    _fill_top(message, details.top_log_probs)
    if details.generation_logits:
        message.generation_logits.CopyFrom(_tensor(details.generation_logits))


def _fill_prompt(message: pb.PromptDetails, prompt: PromptDetails) -> None:
    message.token_offset = prompt.token_offset
    message.log_probs.extend(prompt.log_probs)
    _fill_top(message, prompt.top_log_probs)
    if prompt.context_logits:
        message.context_logits.CopyFrom(_tensor(prompt.context_logits))


def _fill_top(message: pb.TokenDetails | pb.PromptDetails, tops: Iterable[TopLogProbs]) -> None:
    for token_ids, log_probs in tops:
        message.top_log_probs.add(token_ids=token_ids, log_probs=log_probs)


def _tensor(tensor: Tensor) -> pb.Tensor:
    return pb.Tensor(
        data_type=pb.DataType.ValueType(tensor.data_type), shape=tensor.shape, data=tensor.data
    )
