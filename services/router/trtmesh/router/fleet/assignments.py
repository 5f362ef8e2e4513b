"""The sequences of a worker by handle, and the distribution of its steps to them."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from trtmesh.chassis.error_wire import from_proto
from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.links.contract import ContractBroken
from trtmesh.router.metrics import ModelMetrics, RouterMetrics
from trtmesh.router.placement.load_guard import Booking, LoadGuard
from trtmesh.router.streams.sequence import Charge, End, Mover, SequenceTimes
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import generation_pb2 as generation_pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb

HANDLES = 2**32


class Held(Protocol):
    """A sequence as its worker sees it, or a copy of one."""

    @property
    def owner(self) -> Mover: ...
    @property
    def model(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def sequence_index(self) -> int: ...
    @property
    def most_tokens(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def times(self) -> SequenceTimes: ...
    @property
    def charge(self) -> Charge | None: ...
    @property
    def assignment(self) -> object | None:
        """None once it has left its worker."""

    @property
    def address(self) -> str: ...
    @property
    def waits_for_worker(self) -> bool: ...

    def assign(self, assignment: Handle) -> None: ...
    def on_prompt(self, details: generation_pb.PromptDetails) -> None: ...
    def on_start(self, metrics: generation_pb.PerfMetrics) -> None: ...
    def on_tokens(
        self,
        token_offset: int,
        token_ids: list[int],
        details: generation_pb.TokenDetails | None = None,
    ) -> None: ...
    def check_end(self, end: pb.SequenceEnd) -> None: ...
    def on_end(self, end: End) -> None: ...
    def on_worker_lost(self, error: TrtmeshError) -> None: ...


class Loser(Protocol):
    """A copy that was stopped because another is ahead."""

    def on_tokens(self, token_offset: int, token_ids: list[int]) -> None:
        """Takes what its worker still computed."""

    def on_gone(self) -> None:
        """The worker reported its end, or was lost."""


StepWatcher: TypeAlias = Callable[[float, int], None]
"""Learns the pace of a worker: takes the time of a step, and how many sequences have a token and no end after it."""


@dataclass(slots=True, eq=False)
class Assignments:
    """Allocates handles to sequences and counts them in the worker's load guard."""

    address: str
    _guard: LoadGuard
    _send: Callable[[pb.EngineCommand], None]
    _queue_seconds: float
    """Longest wait of a sequence before its first token, and between two."""
    _none_late_until: float = math.inf
    _next_handle: int = 0
    _looks: int = 0
    sequences: dict[int, Held] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    """Handles of moved sequences without a reported end."""
    losers: dict[int, Loser] = field(default_factory=dict)
    """Of these, the copies that are still compared."""
    _stopping: dict[int, int] = field(default_factory=dict)
    """The look before which the worker was asked to end a sequence, the longest asked first."""

    def assign(self, runs: Sequence[Held], booking: Booking) -> int:
        """Gives successive handles to the sequences of `booking`; returns the first."""
        first = self._free_handles(len(runs))
        now = asyncio.get_running_loop().time()
        self._guard.assign(range(first, first + len(runs)), booking, now)
        for handle, run in enumerate(runs, first):
            self.sequences[handle] = run
            run.assign(Handle(self, handle))
            self._none_late_until = min(self._none_late_until, self._due(run.times))
        return first

    def ended(self, handle: int, error: TrtmeshError | None, now: float) -> Held | None:
        """Removes a sequence at the reported end; None after a move."""
        run = self.sequences.pop(handle, None)
        self._stopping.pop(handle, None)
        if run is None:
            self.released.discard(handle)
            if (loser := self.losers.pop(handle, None)) is not None:
                loser.on_gone()
            return None
        self._guard.leave(handle, now, error)
        return run

    def none_queued(self, now: float) -> None:
        """The worker's queue is empty, so every sequence has started; those with a token anyway."""
        for handle in self._guard.awaiting:
            times = self.sequences[handle].times
            times.started = times.started or now

    def late(self, now: float) -> list[Held]:
        """Sequences past their deadline. Looks at them only when one may be: deadlines move away with every token."""
        if now <= self._none_late_until:
            return []
        due = [(self._due(run.times), run) for run in self.sequences.values()]
        self._none_late_until = min((at for at, _ in due), default=math.inf)
        return [run for at, run in due if now > at]

    def _due(self, times: SequenceTimes) -> float:
        """The deadline of a sequence's next token."""
        since = times.last_token if times.has_token else times.started or times.assigned
        return since + times.patience * self._queue_seconds

    def look(self, most: int) -> None:
        """Counts a look. Raises ContractBroken for a sequence that was asked to end more than `most` looks ago."""
        self._looks += 1
        for handle, asked in self._stopping.items():
            if self._looks - asked > most:
                raise ContractBroken(f"it did not end sequence {handle}, which it was asked to end")
            return

    def by_owner(self) -> Mapping[Mover, list[Held]]:
        """Sequences grouped by item."""
        by_owner: dict[Mover, list[Held]] = {}
        for run in self.sequences.values():
            by_owner.setdefault(run.owner, []).append(run)
        return by_owner

    def clear(self) -> list[Held]:
        """Frees every handle after the loss of the worker; returns the sequences."""
        runs, losers = list(self.sequences.values()), list(self.losers.values())
        self.losers.clear()
        for loser in losers:
            loser.on_gone()
        self.sequences.clear()
        self.released.clear()
        self._stopping.clear()
        return runs

    def _free_handles(self, count: int) -> int:
        """First of `count` successive free handles."""
        while True:
            first = self._next_handle if self._next_handle + count <= HANDLES else 0
            self._next_handle = first + count
            handles = range(first, first + count)
            if self.sequences.keys().isdisjoint(handles) and self.released.isdisjoint(handles):
                return first


@dataclass(slots=True, eq=False)
class Handle:
    """The assignment of a sequence to a worker."""

    _assignments: Assignments
    _number: int
    _stopping: bool = False

    @property
    def address(self) -> str:
        return self._assignments.address

    def stop(self, reason: generation_pb.FinishReason.ValueType) -> None:
        """Asks the worker to end the sequence, once."""
        if not self._stopping:
            self._stopping = True
            self._ask_to_end(reason)

    def release(self, error: TrtmeshError | None) -> None:
        """Stops a moving sequence; `error` is the worker's fault, if any. The reported end frees the handle."""
        table, number = self._assignments, self._number
        self._ask_to_end(generation_pb.FINISH_REASON_CANCELLED)
        if table.sequences.pop(number, None) is not None:
            table.released.add(number)
            table._guard.leave(number, asyncio.get_running_loop().time(), error)

    def _ask_to_end(self, reason: generation_pb.FinishReason.ValueType) -> None:
        table, number = self._assignments, self._number
        if number in table.sequences:
            table._stopping.setdefault(number, table._looks)
            table._send(pb.EngineCommand(stop=pb.StopCommand(handles=[number], reason=reason)))

    def leave_kv(self, lease_id: str, seconds: float) -> None:
        """Asks the worker to stop the sequence at the next token, and to keep the KV under a lease."""
        command = kv_pb.HandOverCommand(
            handle=self._number, lease_id=lease_id, expires_in_ms=round(seconds * 1000)
        )
        self._assignments._send(pb.EngineCommand(hand_over=command))

    def substitute(self, held: Held) -> None:
        """Puts a copy in the place of the sequence, or the sequence in that of a copy; nothing after the end."""
        if self._number in self._assignments.sequences:
            self._assignments.sequences[self._number] = held

    def lose(self, loser: Loser) -> None:
        """Stops a copy, of which `loser` sees what still comes."""
        if self._number in self._assignments.sequences:
            self.release(None)
            self._assignments.losers[self._number] = loser
        else:
            loser.on_gone()


UNACKNOWLEDGED_STEPS = 4
"""Most steps in flight. Few, because held-back tokens merge at the worker, while each step in flight adds latency."""

ACKNOWLEDGE_EVERY = 3
"""Steps per acknowledgement, since a write costs as much as several tokens, and wakes a worker that sleeps between its
steps. Fewer than are in flight, so that a router that keeps up leaves credit."""

LARGE_STEP_TOKENS = 2**14
"""Beyond so many tokens of a step, the counts are added up before reading."""

MOST_UNASKED_TOKENS = 2**12
"""Most tokens of a sequence in a large step, if this router does not wait for it any more."""


@dataclass(slots=True)
class Steps:
    """Reads and acknowledges the steps of a worker."""

    _assignments: Assignments
    _guard: LoadGuard
    _metrics: RouterMetrics
    _new_command: Callable[[int], pb.EngineCommand]
    _received: int = 0
    most_tokens: int = sys.maxsize
    """Most tokens of a sequence of the worker."""
    watcher: StepWatcher | None = None

    def opened(self) -> None:
        """Starts counting on a new stream."""
        self._received = 0

    def distribute(self, step: pb.Step) -> None:
        """Hands new tokens to each sequence. Hot: no per-token objects, no logging. Raises ContractBroken."""
        sequences, losers = self._assignments.sequences, self._assignments.losers
        handles, offsets, counts = step.handles[:], step.token_offsets[:], step.token_counts[:]
        _check_step(step, counts, sequences, self.most_tokens)
        details = {each.handle: each.details for each in step.details} if step.details else {}
        # Slices: protobuf ends an iteration with an error, which costs as much as a call.
        for prompt in step.prompts[:]:
            if (run := sequences.get(prompt.handle)) is not None:
                run.on_prompt(prompt.details)
        for start in step.starts[:]:
            if (run := sequences.get(start.handle)) is not None:
                run.on_start(start.perf_metrics)
        now = asyncio.get_running_loop().time()
        awaiting = self._guard.awaiting
        metrics: ModelMetrics | None = None
        token_ids = step.token_ids[:]
        position = 0
        for handle, offset, count in zip(handles, offsets, counts, strict=True):
            if awaiting and (booking := awaiting.pop(handle, None)) is not None:
                booking.started(now)
            run = sequences.get(handle)
            if run is not None:
                run.on_tokens(offset, token_ids[position : position + count], details.get(handle))
                if metrics is None:
                    # A worker serves one model.
                    metrics = self._metrics.models[run.model]
                run.times.on_tokens(count, now, metrics)
                if run.charge is not None:
                    run.charge.up_to(len(run.token_ids), now)
            elif losers and (loser := losers.get(handle)) is not None:
                loser.on_tokens(offset, token_ids[position : position + count])
            position += count
        for end in step.ends[:]:
            if (run := sequences.get(end.handle)) is not None:
                run.check_end(end)
            ended = _end_of(end)
            if (run := self._assignments.ended(end.handle, ended.error, now)) is not None:
                run.on_end(ended)
        if self.watcher is not None:
            self.watcher(now, len(sequences) - len(awaiting))
        self._received += 1
        if self._received % ACKNOWLEDGE_EVERY == 0:
            self._new_command(0).acknowledge.received_steps = self._received


def _end_of(end: pb.SequenceEnd) -> End:
    return End(
        reason=end.reason,
        error=from_proto(end.error) if end.HasField("error") else None,
        cached_prompt_tokens=end.cached_prompt_tokens,
        stop_token_ids=tuple(end.stop_token_ids[:]),
        cumulative_log_prob=(
            end.cumulative_log_prob if end.HasField("cumulative_log_prob") else None
        ),
        perf_metrics=end.perf_metrics if end.HasField("perf_metrics") else None,
        handoff=end.handoff if end.HasField("handoff") else None,
    )


def _check_step(
    step: pb.Step, counts: Sequence[int], sequences: Mapping[int, Held], most_tokens: int
) -> None:
    """Raises ContractBroken unless the lists of a step fit each other, and a large step fits the sequences of the
    worker, with at most `most_tokens`."""
    tokens = len(step.token_ids)
    lengths = {len(step.handles), len(step.token_offsets), len(counts)}
    if len(lengths) > 1 or sum(counts) != tokens:
        raise ContractBroken(
            f"a step has {len(step.handles)} handles, {len(step.token_offsets)} offsets,"
            f" {len(counts)} counts and {tokens} tokens"
        )
    if tokens > LARGE_STEP_TOKENS:
        for handle, count in zip(step.handles, counts, strict=True):
            run = sequences.get(handle)
            most = min(run.most_tokens, most_tokens) if run is not None else MOST_UNASKED_TOKENS
            if count > most:
                raise ContractBroken(f"a step has {count} tokens of a sequence of at most {most}")
