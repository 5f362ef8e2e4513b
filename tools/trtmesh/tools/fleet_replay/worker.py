"""A worker in virtual time: the scheduler and the engine of the simulated backend, whose steps take no time here."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import count

from trtmesh.engine.backend import Reserved, StepOutput
from trtmesh.engine.backends.simulated.engine import (
    SimulatedEngine,
    SimulatedHandoffs,
    new_scheduler,
)
from trtmesh.engine.backends.simulated.sequence import SimulatedSequence
from trtmesh.engine.backends.simulated.tokens import TokenSource
from trtmesh.router.placement.rates import Report
from trtmesh.router.placement.snapshot import Role
from trtmesh.tools.fleet_replay.adapters import ReplayedAdapters
from trtmesh.tools.fleet_replay.fleet_model import FleetModel

SOURCE = TokenSource(0, 255, 0, 0.0)


class VirtualTime:
    """A clock that jumps from one event to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (seconds, next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run_until(self, seconds: float) -> None:
        """Handles all events due by a time."""
        while self._events and self._events[0][0] <= seconds:
            self.now, _, event = heapq.heappop(self._events)
            event()
        if seconds != float("inf"):
            self.now = seconds


class ReplayedWorker:
    """Runs the steps of an engine.

    Steps in which sequences only generate are run at once: until the next of them ends, or something changes.
    """

    def __init__(
        self,
        address: str,
        role: Role,
        model: FleetModel,
        sizes: tuple[int, int],
        time: VirtualTime,
        deliver: Callable[[ReplayedWorker, StepOutput], None],
    ) -> None:
        """`sizes` are the blocks of the pool and the tokens of a block."""
        total_blocks, tokens_per_block = sizes
        self.address = address
        self.role = role
        self.adapters = ReplayedAdapters(model, time.after, self.go_on)
        self.scheduler = new_scheduler(
            self.adapters,
            total_blocks=total_blocks,
            tokens_per_block=tokens_per_block,
            prefill_tokens_per_step=model.prefill_tokens_per_step,
            max_batch_size=model.max_batch_size,
            adapter_slots=model.adapter_slots,
        )
        self.adapters.slots = self.scheduler.adapters
        self.reported_at = 0.0
        self.received_at = 0.0
        """End of the last transfer of KV."""
        self.received_bytes = 0
        self.receiving_seconds = 0.0
        self.step_began_at = 0.0
        """Start of the step under way, or of the last one."""
        self._engine = SimulatedEngine(
            self.scheduler, self.adapters, SimulatedHandoffs(self.scheduler), SOURCE
        )
        self._model = model
        self._time = time
        self._deliver = deliver
        self._steps = 0
        """Steps to the next event, the one under way included; 0 without work."""
        self._step_seconds = 0.0
        self._ends_at = 0.0
        """End of the last of these steps."""
        self.busy_seconds = 0.0
        """Of the steps completed."""

    def submit(self, sequence: SimulatedSequence) -> None:
        """Takes a sequence; one with a receiver's lease gets the blocks of the lease, with their KV."""
        self._catch_up()
        lease_id = sequence.receiver_lease
        self._engine.add([sequence])
        if lease_id:
            self._engine.adopt(lease_id)
        self.go_on()

    def reserve(self, lease_id: str, tokens: int, names: Sequence[int]) -> Reserved:
        """Reserves blocks for a sequence from another worker."""
        handoffs = self._engine.handoffs
        self._engine.reserve(lease_id, tokens, names)
        reserved = handoffs.news.pop()
        assert isinstance(reserved, Reserved)
        return reserved

    def drop(self, lease_id: str) -> None:
        """Frees the blocks of a lease."""
        self._engine.drop(lease_id)
        self.go_on()

    def go_on(self) -> None:
        """Lets the scheduler see what changed, after the step under way."""
        self._catch_up()
        self._engine.changed = True
        if output := self._engine.leftover():
            self._deliver(self, output)
        if self._steps > 1:
            self._steps = 1
            self._end_at(self.step_began_at + self._step_seconds)
        elif not self._steps and self._engine.has_work:
            self._begin()

    def report(self) -> Report:
        """The load, as every router is told."""
        self._catch_up()
        scheduler, slots, now = self.scheduler, self.scheduler.adapters, self._time.now
        self.reported_at = now
        return Report(
            at=now,
            busy_seconds=self.busy_seconds + (now - self.step_began_at) * (self._steps > 0),
            step_count=self._engine.step_count,
            running_sequences=len(scheduler.running),
            waiting_sequences=scheduler.waiting_sequences,
            pending_prompt_tokens=scheduler.pending_prompt_tokens,
            computed_prompt_tokens=scheduler.computed_prompt_tokens,
            used_blocks=scheduler.pool.used_blocks,
            total_blocks=scheduler.pool.total_blocks,
            adapter_slots=(slots.slots, slots.free, slots.evictable),
            received_bytes=self.received_bytes,
            receiving_seconds=self.receiving_seconds,
        )

    def _begin(self) -> None:
        engine, model = self._engine, self._model
        self.step_began_at = self._time.now
        prompt_tokens = engine.begin()
        self._step_seconds = (
            model.step_seconds
            + model.step_seconds_per_sequence * len(engine.batch)
            + prompt_tokens / model.prefill_tokens_per_second
        )
        if self.adapters.copies:
            self._step_seconds += model.step_seconds_per_rank * engine.largest_rank
        self._steps = 1 if prompt_tokens else max(1, engine.uneventful_steps)
        self._end_at(self._time.now + self._steps * self._step_seconds)

    def _end_at(self, seconds: float) -> None:
        self._ends_at = seconds
        self._time.at(seconds, self._finish)

    def _catch_up(self) -> None:
        """Completes the steps before the one under way."""
        if self._steps > 1:
            passed = int((self._time.now - self.step_began_at) / self._step_seconds)
            self._skip(min(passed, self._steps - 1))

    def _skip(self, steps: int) -> None:
        if steps:
            self._engine.skip(steps)
            self._steps -= steps
            self.step_began_at += steps * self._step_seconds
            self.busy_seconds += steps * self._step_seconds

    def _finish(self) -> None:
        """Completes the steps, unless their end was changed."""
        if not self._steps or self._time.now != self._ends_at:
            return
        self._skip(self._steps - 1)
        self.busy_seconds += self._step_seconds
        self._steps = 0
        self._deliver(self, self._engine.finish())
        if not self._steps and self._engine.has_work:
            self._begin()
