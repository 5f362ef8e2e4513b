"""The sequences of a worker, by handle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from trtmesh.chassis.errors import TrtmeshError
from trtmesh.router.links.contract import ContractBroken
from trtmesh.router.links.deadlines import Deadlines
from trtmesh.router.placement.load_guard import Booking, LoadGuard
from trtmesh.router.streams.sequence import Owner, SequenceRun, SequenceTimes
from trtmesh.v1 import engine_pb2 as pb
from trtmesh.v1 import generation_pb2 as generation_pb
from trtmesh.v1 import kv_transfer_pb2 as kv_pb

HANDLES = 2**32


@dataclass(slots=True, eq=False)
class Assignments:
    """Allocates handles to sequences and counts them in the worker's load guard."""

    address: str
    _guard: LoadGuard
    _send: Callable[[pb.EngineCommand], None]
    _next_handle: int = 0
    _looks: int = 0
    _queued: set[SequenceRun] = field(default_factory=set)
    """Sequences possibly still in the worker's queue."""
    sequences: dict[int, SequenceRun] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    """Handles of moved sequences without a reported end."""
    _stopping: dict[int, int] = field(default_factory=dict)
    """The look before which the worker was asked to end a sequence, the longest asked first."""

    def assign(self, runs: Sequence[SequenceRun], booking: Booking) -> int:
        """Gives successive handles to the sequences of `booking`; returns the first."""
        first = self._free_handles(len(runs))
        now = asyncio.get_running_loop().time()
        self._guard.assign(range(first, first + len(runs)), booking, now)
        for handle, run in enumerate(runs, first):
            self.sequences[handle] = run
            run.assign(Handle(self, handle))
            self._queued.add(run)
        return first

    def stop(self, handle: int, reason: generation_pb.FinishReason.ValueType) -> None:
        """Asks the worker to end a sequence."""
        if handle in self.sequences:
            self._stopping.setdefault(handle, self._looks)
            self._send(pb.EngineCommand(stop=pb.StopCommand(handles=[handle], reason=reason)))

    def release(self, handle: int, error: TrtmeshError | None) -> None:
        """Stops a moving sequence; `error` is the worker's fault, if any. The reported end frees the handle."""
        self.stop(handle, generation_pb.FINISH_REASON_CANCELLED)
        if (run := self.sequences.pop(handle, None)) is not None:
            self._queued.discard(run)
            self.released.add(handle)
            self._guard.leave(handle, asyncio.get_running_loop().time(), error)

    def hand_over(self, handle: int, lease_id: str, seconds: float) -> None:
        """Asks the worker to stop a sequence at its next token, and to keep its KV under a lease."""
        milliseconds = round(seconds * 1000)
        command = kv_pb.HandOverCommand(
            handle=handle, lease_id=lease_id, expires_in_ms=milliseconds
        )
        self._send(pb.EngineCommand(hand_over=command))

    def ended(self, handle: int, error: TrtmeshError | None, now: float) -> SequenceRun | None:
        """Removes a sequence at the reported end; None after a move."""
        run = self.sequences.pop(handle, None)
        self._stopping.pop(handle, None)
        if run is None:
            self.released.discard(handle)
            return None
        self._guard.leave(handle, now, error)
        self._queued.discard(run)
        return run

    def none_queued(self, now: float) -> None:
        """The worker's queue is empty, so every sequence has started."""
        for run in self._queued:
            run.times.started = now
        self._queued.clear()

    def late(self, now: float, deadlines: Deadlines) -> list[SequenceRun]:
        """Sequences past their deadline."""
        return [run for run in self.sequences.values() if _is_late(run.times, now, deadlines)]

    def look(self, most: int) -> None:
        """Counts a look. Raises ContractBroken for a sequence that was asked to end more than `most` looks ago."""
        self._looks += 1
        for handle, asked in self._stopping.items():
            if self._looks - asked > most:
                raise ContractBroken(f"it did not end sequence {handle}, which it was asked to end")
            return

    def by_owner(self) -> Mapping[Owner, list[SequenceRun]]:
        """Sequences grouped by item."""
        by_owner: dict[Owner, list[SequenceRun]] = {}
        for run in self.sequences.values():
            by_owner.setdefault(run.owner, []).append(run)
        return by_owner

    def clear(self) -> list[SequenceRun]:
        """Frees every handle after the loss of the worker; returns the sequences."""
        runs = list(self.sequences.values())
        self.sequences.clear()
        self.released.clear()
        self._stopping.clear()
        self._queued.clear()
        return runs

    def _free_handles(self, count: int) -> int:
        """First of `count` successive free handles."""
        while True:
            first = self._next_handle if self._next_handle + count <= HANDLES else 0
            self._next_handle = first + count
            handles = range(first, first + count)
            if not any(h in self.sequences or h in self.released for h in handles):
                return first


def _is_late(times: SequenceTimes, now: float, deadlines: Deadlines) -> bool:
    has_token = times.last_token > times.assigned
    since = times.last_token if has_token else times.started or times.assigned
    return now - since > times.patience * deadlines.queue_seconds


@dataclass(slots=True, eq=False)
class Handle:
    """The assignment of a sequence to a worker. Repeated stops are sent once."""

    _assignments: Assignments
    _number: int
    _stopping: bool = False

    @property
    def address(self) -> str:
        return self._assignments.address

    def stop(self, reason: generation_pb.FinishReason.ValueType) -> None:
        if not self._stopping:
            self._stopping = True
            self._assignments.stop(self._number, reason)

    def release(self, error: TrtmeshError | None) -> None:
        self._assignments.release(self._number, error)

    def hand_over(self, lease_id: str, seconds: float) -> None:
        self._assignments.hand_over(self._number, lease_id, seconds)
